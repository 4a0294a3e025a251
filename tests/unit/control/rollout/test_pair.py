"""A drafter's way to a cohort, on a clock of its own."""

from dataclasses import replace

import pytest

from foreword.control.policy_file.document import Guards, RolloutRule, Stage
from foreword.control.reporting.figures import Bounds
from foreword.control.rollout.evidence import Outcome
from foreword.control.rollout.guards import DrafterHealth
from foreword.control.rollout.pair import Forecast, PairRollout
from helpers.clocks import ScriptedClock

RULE = RolloutRule(
    "head", "code", steps=(5, 100), min_requests=100, min_passes=1000, verify_samples=10, min_levels=100
)
WELL, GOOD = DrafterHealth(draft_requests=1000), Forecast(500, 1.3, 0.05)
ORDINARY = Outcome(passes=20, tokens=30, ttft=0.1, tpot=0.02, cost=1.0)


def pair(stage: Stage = Stage.SHADOW, **changes: object) -> PairRollout:
    found = PairRollout(replace(RULE, **changes), ScriptedClock(tick=1.0))  # type: ignore[arg-type]
    found.begin()
    found.move(stage, "test")
    return found


def fill(
    found: PairRollout, canary: Outcome = ORDINARY, control: Outcome = ORDINARY, count: int = 100
) -> None:
    for number in range(count):
        wave = 1 + 0.1 * (number % 10)  # times differ, as they do
        for outcome, is_canary in ((canary, True), (control, False)):
            assert outcome.tpot is not None
            found.add_outcome(replace(outcome, tpot=wave * outcome.tpot, ttft=wave * outcome.ttft), is_canary)


def test_a_good_drafter_goes_all_the_way():
    found = pair()
    assert not found.evaluate(WELL, Forecast(99, 1.3, 0.05))
    assert found.evaluate(WELL, GOOD)
    for _ in range(10):
        assert found.stage is Stage.VERIFY
        found.add_comparison(None)
    assert (found.stage, found.percent) == (Stage.CANARY, 5)
    fill(found)
    assert found.evaluate(WELL, GOOD)
    assert (found.stage, found.percent) == (Stage.CANARY, 100)
    fill(found)
    assert found.evaluate(WELL, GOOD)
    assert found.stage is Stage.ON
    assert [move.stage for move in found.moves][-4:] == [Stage.VERIFY, Stage.CANARY, Stage.CANARY, Stage.ON]


def test_in_the_shadow_it_needs_evidence_and_a_gain_beyond_doubt():
    found = pair()
    assert not found.evaluate(WELL, Forecast(500, 1.3, 0.5))  # may be anything
    assert not found.evaluate(WELL, Forecast(500, 1.01, 0.01))  # too little to be worth it
    assert found.evaluate(WELL, Forecast(500, 0.9, 0.02))
    assert found.stage is Stage.OFF
    assert found.reason.startswith("low gain")


@pytest.mark.parametrize(
    ("canary", "reason"),
    [
        (replace(ORDINARY, tpot=0.04), "TPOT p95"),
        (replace(ORDINARY, ttft=0.3), "TTFT p95"),
        (replace(ORDINARY, is_error=True), "errors"),
        (replace(ORDINARY, preemptions=2), "preemptions"),
        (replace(ORDINARY, cost=1.5), "cost"),
    ],
)
def test_a_canary_that_does_worse_than_its_control_arm_is_rolled_back(canary: Outcome, reason: str):
    found = pair(Stage.CANARY)
    fill(found, canary)
    gate = found.gate("", next(n for n in map(str, range(1000)) if found.is_canary("", n)))
    assert gate is not None
    assert gate.is_open
    assert found.evaluate(WELL, GOOD)
    assert found.stage is Stage.HELD
    assert found.reason.startswith(reason)
    assert not gate.is_open  # for those that run, from the next step on
    assert found.gate("", "1") is None


@pytest.mark.parametrize("stage", [Stage.CANARY, Stage.ON])
@pytest.mark.parametrize(
    ("health", "reason"),
    [
        (DrafterHealth(draft_requests=100, faults=10), "faults"),
        (DrafterHealth(draft_requests=100, gain=Bounds(0.9, 0.95, 0.98)), "gain"),
        (DrafterHealth(draft_requests=100, trips=1), "gain"),
        (DrafterHealth(draft_requests=100, memory_bytes=2 << 30), "memory"),
    ],
)
def test_a_drafter_that_is_in_use_is_watched(stage: Stage, health: DrafterHealth, reason: str):
    found = pair(stage, guards=Guards(memory_bytes=1 << 30))
    assert found.evaluate(health, GOOD)
    assert found.stage is Stage.HELD
    assert found.reason.startswith(reason)


def test_what_may_be_luck_rolls_nothing_back():
    found = pair(Stage.CANARY)
    fill(found)
    found.add_outcome(replace(ORDINARY, is_error=True), True)
    found.arms.canary.passes = 0  # not enough to go on
    luck = DrafterHealth(draft_requests=1000, faults=2, gain=Bounds(0.95, 0.98, 1.01))
    assert not found.evaluate(luck, GOOD)
    assert found.stage is Stage.CANARY


def test_one_mismatch_ends_it_where_nothing_else_changes_a_text():
    found = pair(Stage.VERIFY)
    found.add_comparison(None)
    found.add_comparison("tokens differ from number 3 of 9 on")
    assert found.stage is Stage.HELD
    assert found.reason.startswith("mismatch: tokens differ from number 3")


def test_where_texts_change_with_the_batch_it_may_not_change_more_of_them():
    found = pair(Stage.VERIFY)
    for number in range(10):
        found.add_comparison("tokens differ" if number % 2 else None, is_plain_different=number % 2 == 0)
    assert found.stage is Stage.CANARY
    found = pair(Stage.VERIFY, verify_samples=100)
    for number in range(12):
        found.add_comparison("tokens differ", is_plain_different=number < 2)
    assert found.stage is Stage.HELD


def test_by_hand_every_move_waits_for_the_operator():
    found = pair(promote="manual")
    assert not found.evaluate(WELL, GOOD)
    assert found.is_ready
    found.promote()
    assert found.stage is Stage.VERIFY
    for _ in range(10):
        found.add_comparison(None)
    assert (found.stage, found.is_ready) == (Stage.VERIFY, True)
    found.promote()
    fill(found)
    assert not found.evaluate(WELL, GOOD)
    found.promote()
    assert found.percent == 100
    found.promote()
    assert found.stage is Stage.ON


def test_requests_stay_in_their_arm_while_the_canary_grows():
    found = pair(Stage.CANARY, steps=(5, 25, 100))
    names = [f"request-{number}" for number in range(4000)]
    small = {name for name in names if found.is_canary("tenant", name)}
    assert 120 < len(small) < 290
    found.move(Stage.CANARY, "test", step=1)
    large = {name for name in names if found.is_canary("tenant", name)}
    assert small < large
    assert 850 < len(large) < 1150
    assert {name for name in names if found.is_canary("another", name)} != large


def test_the_gate_of_every_stage():
    found = pair(Stage.SHADOW)
    shadow = found.gate("", "1")
    assert shadow is not None
    assert (shadow.is_open, shadow.may_observe) == (False, True)
    found.move(Stage.CANARY, "test")
    outside = next(name for name in map(str, range(100)) if not found.is_canary("", name))
    assert found.gate("", outside) is None
    found.move(Stage.ON, "test")
    now = found.gate("", "1")
    assert now is not None
    assert now.is_open
    assert not shadow.is_open  # never switching arm
    found.move(Stage.OFF, "test")
    assert found.gate("", "1") is None
    assert not now.is_open
