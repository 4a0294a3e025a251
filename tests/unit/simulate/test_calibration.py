"""Numbers out of the files of `foreword bench`."""

import json
from pathlib import Path

import pytest

from foreword.bench.link import LinkReport, PassCost
from foreword.errors import RequestError
from foreword.simulate.calibration import Calibration, acceptance_of, calibrate, with_link
from foreword.simulate.scenario import ILLUSTRATIVE, PassTimes

STEP = {"rows": [{"n": 1, "ms": 10.0}, {"n": 8, "ms": 17.0}], "prefill": [{"n": 100, "ms": 50.0}]}
WHOLE = {
    "drafter": "draft_model model=some",
    "category": "all",
    "speedup": 1.5,
    "passes": 100,
    "drafted_per_position": [100, 100, 100, 100],
    "accepted_per_position": [80, 60, 40, 20],
    "draft_ms": 8.0,
    "verify_ms": 14.0,
    "accept_ms": 0.5,
    "rest_ms": 1.5,
    "plain_step_ms": 11.0,
}
CHAT = {**WHOLE, "category": "chat", "accepted_per_position": [90, 80, 70, 60]}
LOOKUP = {**WHOLE, "drafter": "ngram", "speedup": 1.2, "draft_ms": 0.2}


@pytest.fixture
def files(tmp_path: Path):
    def write(name: str, value: object) -> Path:
        path = tmp_path / name
        path.write_text("a table\n" + json.dumps(value) + "\n", encoding="utf-8")
        return path

    return write


def test_passes_prompts_and_what_is_beyond_them(files):
    found = calibrate(step=files("step", STEP))
    times = found.costs.passes
    assert [times.seconds(rows) for rows in (1, 8)] == [0.010, 0.017]
    assert times.seconds(4) == pytest.approx(0.013)
    assert times.seconds(15) == pytest.approx(0.024)  # drawn on
    assert times.most_measured == 8
    assert found.costs.prompt == pytest.approx(0.5e-3)
    assert len(found.assumed) == 2


def test_a_size_that_was_measured_twice_has_one_time(files):
    twice = {"rows": [{"n": 1, "ms": 12.0}, *STEP["rows"]]}
    assert calibrate(step=files("step", twice)).costs.passes == PassTimes(((1, 0.010), (8, 0.017)))


def test_times_are_never_drawn_on_downwards():
    assert PassTimes(((1, 0.01), (2, 0.02), (4, 0.018))).seconds(64) == 0.018


def test_a_drafter_by_kind_of_work(files):
    path = files("drafters", {"rows": [CHAT, WHOLE, {**LOOKUP, "category": "chat"}, LOOKUP]})
    found = calibrate(step=files("step", STEP), drafters=path)
    assert found.costs.local.seconds(1) == pytest.approx(2e-3)  # 8 ms for four levels
    assert found.costs.host == pytest.approx(1e-3)
    assert found.costs.drafting_host == pytest.approx(1e-3)
    assert [kind.survival for kind in found.kinds] == [(0.9, 0.8, 0.7, 0.6)]
    lookup = calibrate(drafters=path, method="ngram").costs
    assert (lookup.local.level, lookup.local.first) == (0.0, pytest.approx(0.2e-3))
    with pytest.raises(RequestError, match=r"--method eagle.* has draft_model model=some, ngram"):
        calibrate(drafters=path, method="eagle")


def test_without_steps_the_drafters_file_says_what_a_pass_takes(files):
    costs = calibrate(drafters=files("drafters", {"rows": [CHAT, WHOLE]})).costs
    assert costs.passes.seconds(1) + costs.host == pytest.approx(11e-3)
    assert costs.passes.seconds(5) == pytest.approx(14e-3)


@pytest.mark.parametrize(
    "change", [{"drafted_per_position": []}, {"drafted_per_position": [0]}, {"passes": 0}]
)
def test_a_drafter_without_drafts_is_refused_by_name(files, change: dict):
    path = files("drafters", {"rows": [CHAT, {**WHOLE, **change}]})
    with pytest.raises(RequestError, match="draft_model model=some drafted nothing"):
        calibrate(drafters=path)


def test_acceptance_is_taken_by_place_and_never_rises():
    found = acceptance_of([100, 50, 10], [80, 20, 9], 200)
    assert found.survival == (0.8, 0.4, 0.4)
    assert found.coverage == (0.5, 0.25, 0.05)
    assert acceptance_of([100], [100], 100).coverage == (1.0,)
    assert found.chances[:4] == pytest.approx((0.8, 0.4, 0.4, 0.4))


def test_a_link_gives_network_levels_and_the_engines_own_work():
    costs = (PassCost(1, 9, 0.1, 0.0, 0.0, 5.2, 2.0), PassCost(11, 9, 0.3, 0.0, 0.0, 9.0, 4.0))
    report = LinkReport("", 0.2, 0.4, costs)
    value = {**vars(report), "costs": [vars(cost) for cost in report.costs]}
    found = with_link(Calibration(), value)
    assert found.network.round_trip == pytest.approx(0.2e-3)
    assert 0.2 < found.network.jitter < 0.4
    assert [found.costs.node.seconds(m) for m in (1, 11)] == pytest.approx([2e-3, 4e-3])
    assert found.costs.node.first == pytest.approx(2e-3)  # 5.2 - 0.2 - 1.5 levels
    assert [found.costs.notifying(m) for m in (1, 11)] == pytest.approx([0.1e-3, 0.3e-3])
    assert with_link(Calibration(), value, runs_ahead=False).costs.node.first == pytest.approx(3e-3)
    silent = {**value, "costs": [vars(PassCost(1, 9, 0.1, 0.0, 0.0, None, None))]}
    with pytest.raises(RequestError, match="more --passes"):
        with_link(Calibration(), silent)


def test_without_files_all_is_illustrative_and_said_to_be():
    found = calibrate()
    assert found.costs == ILLUSTRATIVE
    assert len(found.assumed) == 3


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("step", {"rows": [{"n": 2, "ms": 1.0}]}),
        ("step", {"rows": [{"n": 1, "ms": -1.0}]}),
        ("step", [1, 2]),
        ("drafters", {"rows": [CHAT]}),
        ("drafters", {"rows": [{"category": "all", "drafter": "x", "speedup": 1.0}]}),
        ("link", {"round_trip_ms": 1.0, "round_trip_p99_ms": 1.0, "costs": []}),
        ("link", {"round_trip_ms": "far"}),
    ],
)
def test_other_files_are_refused_by_the_command_that_would_write_them(files, option: str, value: object):
    with pytest.raises(
        RequestError, match=f"--{option} .*is not the output of `foreword bench {option} --json`"
    ):
        calibrate(**{option: files("file", value)})


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(RequestError, match=r"--link .*cannot be read"):
        calibrate(link=tmp_path / "none")
