"""Roll-outs over restarts."""

import json
import logging
from pathlib import Path

import pytest

from foreword.control.policy_file.document import RolloutRule, Stage
from foreword.control.rollout.rollouts import Rollouts
from helpers.clocks import ScriptedClock

RULE = RolloutRule("head", "code", steps=(5, 25, 100), verify_samples=9)
HERE = {"model": "m", "device": "cpu", "version": "1"}


def begun(path: Path, rule: RolloutRule = RULE, made_for: dict[str, str] = HERE) -> Rollouts:
    rollouts = Rollouts(made_for, path, ScriptedClock(tick=1.0))
    rollouts.apply_rules([rule])
    return rollouts


@pytest.mark.parametrize("stage", list(Stage))
def test_a_restart_goes_on_where_it_was(tmp_path: Path, stage: Stage):
    path = tmp_path / "state.json"
    before = begun(path)
    pair = before.pairs["head", "code"]
    pair.move(stage, "some reason", step=1 if stage is Stage.CANARY else 0)
    pair.add_comparison(None)
    before.save()
    after = begun(path).pairs["head", "code"]
    assert (after.stage, after.step, after.reason, after.since) == (
        stage,
        pair.step,
        "some reason",
        pair.since,
    )
    assert after.decoded_again == (1 if stage is Stage.VERIFY else 0)
    assert list(after.moves) == list(pair.moves)
    names = map(str, range(1000))
    gate = after.gate(
        "", next(name for name in names if stage is not Stage.CANARY or after.is_canary("", name))
    )
    assert (gate is None) == (stage in (Stage.OFF, Stage.HELD))
    if stage is Stage.ON:
        assert gate is not None
        assert gate.is_open


def test_another_salt_begins_anew(tmp_path: Path):
    path = tmp_path / "state.json"
    before = begun(path)
    before.pairs["head", "code"].move(Stage.HELD, "broken")
    before.save()
    again = begun(path, RolloutRule("head", "code", salt="second"))
    assert again.pairs["head", "code"].stage is Stage.SHADOW


def test_what_the_operator_made_by_hand_is_kept_too(tmp_path: Path):
    path = tmp_path / "state.json"
    before = begun(path)
    before.set_stage("ngram", "code", "off")
    after = begun(path)
    assert after.pairs["ngram", "code"].stage is Stage.OFF
    after.apply_rules([RULE])
    assert after.pairs["ngram", "code"].stage is Stage.OFF


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"version": 1}', '{"version": 2, "made_for": {}, "pairs": []}', "\x00\xff"],
)
def test_a_damaged_file_is_ignored_with_one_line(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "state.json"
    path.write_text(content, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        found = begun(path).pairs["head", "code"]
    assert found.stage is Stage.SHADOW
    assert len(caplog.records) == 1
    assert "\n" not in caplog.records[0].getMessage()
    # It may be somebody's: a name is soon mistaken.
    begun(path).save()
    assert (tmp_path / "state.json.ignored").read_text(encoding="latin-1") == content


@pytest.mark.parametrize("place", ["stage", "step", "moves", "salt", "since"])
def test_a_pair_that_makes_no_sense_spoils_the_file(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "state.json"
    begun(path).save()
    value = json.loads(path.read_text())
    value["pairs"][0][place] = {"stage": "nowhere", "step": -1, "moves": [1], "since": "x"}.get(place)
    if place == "salt":
        del value["pairs"][0][place]
    path.write_text(json.dumps(value))
    with caplog.at_level(logging.WARNING):
        assert begun(path).pairs["head", "code"].stage is Stage.SHADOW
    assert len(caplog.records) == 1


def test_another_models_file_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "state.json"
    before = begun(path)
    before.pairs["head", "code"].move(Stage.ON, "done")
    before.save()
    with caplog.at_level(logging.WARNING):
        other = begun(path, made_for={**HERE, "model": "another"})
    assert other.pairs["head", "code"].stage is Stage.SHADOW
    assert "another model" in caplog.text


def test_a_disk_that_cannot_be_written_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    rollouts = Rollouts(HERE, tmp_path / "nowhere" / "state.json", ScriptedClock())
    rollouts.apply_rules([RULE])
    with caplog.at_level(logging.WARNING):
        rollouts.save()
    assert "not saved" in caplog.text
