"""Good and bad drafters on their way into an engine."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from foreword.control.policy_file.document import Stage
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.guard import GuardedDrafter
from foreword.speculation.accept import Acceptance
from foreword.speculation.requests import Verdict
from helpers.rollout_world import POLICY, VOCAB, Guesser, RolloutWorld


def stages(world: RolloutWorld) -> list[Stage]:
    return [move.stage for move in world.pair.moves]


def test_a_good_drafter_reaches_on_and_texts_stay_what_they_are(tmp_path: Path):
    world = RolloutWorld(tmp_path, Guesser)
    world.run_until(lambda: world.pair.stage is Stage.ON)
    assert stages(world) == [Stage.SHADOW, Stage.VERIFY, Stage.CANARY, Stage.CANARY, Stage.ON]
    report = world.core.stats().control
    assert report is not None
    (pair,) = report.pairs
    assert (pair.drafter, pair.cohort, pair.state, pair.in_use) == ("fresh", "code/greedy", "on", True)
    assert pair.predicted is not None
    assert pair.predicted.mean > 1.1
    assert pair.break_even is not None
    assert pair.break_even < pair.acceptance_by_level[0]
    assert report.mismatches == 0


def test_in_the_shadow_and_while_it_is_verified_no_guess_is_used(tmp_path: Path):
    world = RolloutWorld(tmp_path, Guesser)
    passes = []
    while world.pair.stage in (Stage.SHADOW, Stage.VERIFY):
        world.answer()
        passes.append(world.core.stats().cohorts["plain/code/greedy"].tokens)
    asked = [name for name in world.core.stats().cohorts if "fresh" in name]
    judged = {name: world.core.situation.cohorts[name].drafted for name in asked}
    assert judged["fresh/code/check"] > 0
    assert judged["fresh/code/greedy"] == 0


def _spoil(monkeypatch: pytest.MonkeyPatch, other: Callable[[int], int]) -> None:
    """A rule that makes another token of the one behind a draft."""
    real = Acceptance.verdicts

    def verdicts(acceptance: Acceptance) -> list[Verdict]:
        return [
            v._replace(tokens=(*v.tokens[:-1], other(v.tokens[-1]))) if len(d) and v.tokens else v
            for v, d in zip(real(acceptance), acceptance.drafts, strict=True)
        ]

    monkeypatch.setattr(Acceptance, "verdicts", verdicts)


def test_one_that_changes_texts_is_found_out_before_anybody_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    _spoil(monkeypatch, lambda token: (token + 1) % VOCAB)
    world = RolloutWorld(tmp_path, Guesser)
    world.run_until(lambda: world.pair.stage is Stage.HELD)
    assert stages(world) == [Stage.SHADOW, Stage.VERIFY, Stage.HELD]
    assert world.pair.reason.startswith("mismatch: tokens differ")
    world.answer()  # checks every answer: nobody was served a wrong text


def drawing_world(folder: Path, samples: int = 24) -> RolloutWorld:
    """Texts are drawn, and may come out differently with every drafter; they wait to be drawn again."""
    policy = {**POLICY, "rollout": {**POLICY["rollout"], "verify_samples": samples}}
    world = RolloutWorld(folder, Guesser, policy, rule="token", temperature=8.0, tokens=24)
    checks = world.core.speculation_monitor._checks
    assert checks is not None
    checks.seeds.seed(1)
    world.policy_file.set_stage("fresh", "code", "verify")
    return world


def test_drawn_texts_differ_and_their_law_does_not(tmp_path: Path):
    world = drawing_world(tmp_path, samples=6)
    world.run_until(lambda: world.pair.stage is not Stage.VERIFY)
    assert world.pair.stage is Stage.CANARY
    assert "6 requests decoded again, 0 differently" in world.pair.reason


def test_answers_whose_law_is_compared_have_seeds_of_their_own(tmp_path: Path):
    """Two requests of one user may have the same: their answers would be one answer, counted twice."""
    world = drawing_world(tmp_path)
    seeds = []
    for _ in range(3):
        world.answer(idle=False)
        while (check := world.core.speculation_monitor.next_replay()) is not None:
            seeds.append(check[0].params.seed)
            world.core.enqueue(world.core.prepare(*check))
            world._run()
    assert len(seeds) == len(set(seeds)) == 6


def test_one_that_changes_the_law_of_drawn_texts_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    _spoil(monkeypatch, lambda token: token // 4 * 4)  # some tokens come too often
    world = drawing_world(tmp_path)
    world.run_until(lambda: world.pair.stage is not Stage.VERIFY)
    assert world.pair.stage is Stage.HELD
    assert world.pair.reason.startswith("mismatch: distribution: ")


@pytest.mark.parametrize(
    ("guesser", "stage", "reason"),
    [
        (partial(Guesser, right=0.5, seconds=5e-3), Stage.OFF, "low gain"),
        (partial(Guesser, right=0.02, seconds=2e-3), Stage.OFF, "low gain"),
        (partial(Guesser, crashes=True), Stage.HELD, "faults"),
        (partial(Guesser, memory=2_000_000), Stage.HELD, "memory"),
    ],
    ids=["slow", "always wrong", "crashing", "memory-hungry"],
)
def test_a_bad_one_is_given_up_for_the_right_reason(tmp_path: Path, guesser: Any, stage: Stage, reason: str):
    world = RolloutWorld(tmp_path, guesser)
    world.run_until(lambda: world.pair.stage in (Stage.OFF, Stage.HELD), most=500)
    assert (world.pair.stage, world.pair.reason.split(":")[0]) == (stage, reason)


def test_one_that_goes_bad_when_it_is_in_use_is_rolled_back(tmp_path: Path):
    world = RolloutWorld(tmp_path, Guesser)
    world.run_until(lambda: world.pair.stage is Stage.CANARY)
    world.guesser.crashes = True
    world.run_until(lambda: world.pair.stage is Stage.HELD)
    assert world.pair.reason.startswith("faults")
    asks = world.core.speculation_monitor.totals.pairs["fresh", "code/greedy"].asks
    world.answer()
    assert world.core.speculation_monitor.totals.pairs["fresh", "code/greedy"].asks == asks


class TwoAlike(RolloutWorld):
    """Two drafters of one method, the longer of which crashes."""

    def _build(self, config: SpeculationConfig) -> GuardedDrafter:
        crashes = dict(config.options).get("prompt_lookup_max") == 7
        return GuardedDrafter(Guesser(self.clock, crashes=crashes), "+".join(config.method))


def test_a_drafter_is_not_blamed_for_another_with_the_same_method(tmp_path: Path):
    other = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 7}
    rolled = {"min_levels": 150, "verify_samples": 4}
    policy = {
        **POLICY,
        "drafters": {**POLICY["drafters"], "other": other},
        "rollout": [{**rolled, "pair": ["fresh", "code"]}, {**rolled, "pair": ["other", "code"]}],
    }
    world = TwoAlike(tmp_path, Guesser, policy)
    held = world.policy_file.rollouts.pairs["other", "code"]
    world.run_until(lambda: held.stage is Stage.HELD)
    assert held.reason.startswith("faults")
    assert world.pair.stage is not Stage.HELD
    report = world.core.stats().control
    assert report is not None
    faults = {pair.drafter: pair.faults for pair in report.pairs}
    assert faults["fresh"] == 0 < faults["other"]


def test_a_request_interrupts_a_check(tmp_path: Path):
    world = RolloutWorld(tmp_path, Guesser)
    world.run_until(lambda: world.pair.stage is Stage.VERIFY)
    world.answer(idle=False)
    before = world.pair.decoded_again
    world.core.use_idle_time()
    world.core.step()
    assert world.core.has_requests
    world.answer(idle=False)  # the check gives way
    world.core.check_integrity()
    assert world.pair.decoded_again == before
    world.answer()
    assert world.pair.decoded_again > before or world.pair.stage is Stage.CANARY


def test_no_request_fails_for_what_is_done_beside_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    world = RolloutWorld(tmp_path, Guesser)
    for name in ("between_steps", "observe", "ended", "next_replay", "report"):
        monkeypatch.setattr(world.core.speculation_monitor, name, fail)
    world.answer()
    assert world.core.stats().control is None
    assert {"policy", "books", "check"} <= set(world.core.faults)


@pytest.mark.parametrize("stage", list(Stage))
def test_a_new_engine_goes_on_in_every_stage(tmp_path: Path, stage: Stage):
    world = RolloutWorld(tmp_path, Guesser)
    world.pair.move(stage, "planted")
    world.core.close()
    again = RolloutWorld(tmp_path, Guesser)
    assert (again.pair.stage, again.pair.reason) == (stage, "planted")
    again.answer()
    if stage in (Stage.OFF, Stage.HELD):
        assert again.pair.stage is stage
        assert not again.core.speculation_monitor.totals.pairs


def test_the_operator_moves_a_pair_by_hand(tmp_path: Path):
    world = RolloutWorld(tmp_path, Guesser)
    world.core.speculation_monitor.move("fresh", "code", "off")
    assert world.pair.stage is Stage.OFF
    world.core.speculation_monitor.move("fresh", "code", "next")
    assert world.pair.stage is Stage.SHADOW
    world.core.speculation_monitor.move("nobody", "code", "on")  # a line in the log, nothing else
    assert len(world.policy_file.rollouts.pairs) == 1
