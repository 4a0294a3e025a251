"""`foreword bench control` on pretend windows, and what it makes of them."""

import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest

from foreword.bench.control.bench import (
    ControlBenchReport,
    ControlSizes,
    cell_table,
    ratio_chart,
)
from foreword.bench.control.changes import (
    Brake,
    MixedTraffic,
    Reaction,
    SlowedDrafter,
    conditions,
    measure_conditions,
    measure_mixed,
    percentile,
    slowed,
)
from foreword.bench.control.timeline import (
    Ended,
    Phase,
    Step,
    decoding,
    rates_by_second,
    reaction_seconds,
    settled_rate,
    worst_ratio,
)
from foreword.bench.control.windows import (
    CONTROLLER,
    MIXED,
    PLAIN_ARM,
    ControlArm,
    ControlCell,
    MeasuredWindow,
    Prompts,
    control_cell,
    measure_cells,
    tokens_at,
)
from foreword.bench.skeleton import (
    BestFixed,
    Interval,
    against_best,
    bootstrap,
    columns_of,
    joint_confidence,
    table,
)
from foreword.drafters.combined import RoutedDrafter
from foreword.errors import RequestError
from foreword.speculation.drafting import Drafter, DraftSource, Traits
from helpers.clocks import ScriptedClock

OWN = ControlArm(CONTROLLER, None)
FIXED = ControlArm("ngram", {"method": "ngram", "fixed": True})


@dataclass
class PretendStation:
    """Every arm has its rate; whoever comes later in a run is slower."""

    rates: dict[str, float]
    slower: float = 1.0  # from window to window
    asked: list[tuple[str, str, int, int]] = field(default_factory=list)

    def window(self, arm: ControlArm, kind: str, batch: int, number: int) -> MeasuredWindow:
        self.asked.append((arm.label, kind, batch, number))
        return MeasuredWindow(100, 100 / self.rates[arm.label] * self.slower ** len(self.asked))


def nothing(*_: object) -> None:
    pass


def test_arms_take_turns_forwards_and_backwards_and_the_first_round_does_not_count():
    station = PretendStation({"plain": 10.0, CONTROLLER: 12.0, "ngram": 9.0})
    (cell,) = measure_cells(station, [("chat", 2)], [PLAIN_ARM, OWN, FIXED], 4, nothing)
    assert [label for label, *_ in station.asked[:6]] == [
        "plain",
        CONTROLLER,
        "ngram",
        "ngram",
        CONTROLLER,
        "plain",
    ]
    assert cell.windows == 4
    assert cell.ratios.keys() == {CONTROLLER, "ngram"}
    by_number = {
        number: {label for label, _, _, n in station.asked if n == number} for *_, number in station.asked
    }
    assert all(labels == {"plain", CONTROLLER, "ngram"} for labels in by_number.values())
    with pytest.raises(RequestError, match="at least 4"):
        measure_cells(station, [("chat", 2)], [PLAIN_ARM, OWN], 3, nothing)


def test_the_controller_has_time_to_learn_before_it_is_measured_and_how_it_did_is_told():
    station = PretendStation({"plain": 10.0, CONTROLLER: 12.0})
    (cell,) = measure_cells(station, [("chat", 2)], [PLAIN_ARM, OWN], 4, nothing, learning_seconds=1e-6)
    assert [label for label, *_ in station.asked[:5]] == [
        "plain",
        CONTROLLER,
        CONTROLLER,
        CONTROLLER,
        "plain",
    ]
    assert len({number for label, _, _, number in station.asked if label == CONTROLLER}) == 6
    assert cell.learning == pytest.approx(1.2)


def test_a_drift_favours_nobody():
    station = PretendStation({"plain": 10.0, CONTROLLER: 10.0}, slower=1.02)
    (cell,) = measure_cells(station, [("chat", 1)], [PLAIN_ARM, OWN], 12, nothing)
    assert cell.ratios[CONTROLLER].middle == pytest.approx(1.0, abs=0.005)
    assert cell.holds


@pytest.mark.parametrize(("own", "holds"), [(1.3, True), (1.2, False), (0.95, False)])
def test_the_promise_is_about_plain_decoding_and_about_the_best_fixed_setting(own: float, holds: bool):
    rng = random.Random(1)

    def rates(rate: float) -> list[float]:
        return [rate * rng.uniform(0.99, 1.01) for _ in range(12)]

    arms = {"plain": rates(1), "ngram": rates(1.3), CONTROLLER: rates(own)}
    found = control_cell("chat", 1, arms, 0.95)
    assert found.best.label == "ngram"
    assert found.holds == holds
    failures = ControlBenchReport([found]).failures
    assert bool(failures) != holds


def test_the_best_setting_is_chosen_on_one_half_and_compared_on_the_other():
    rates = {"own": [1.0] * 4, "lucky": [2.0, 0.5, 2.0, 0.5], "steady": [1.5, 1.5, 1.5, 1.5]}
    found = against_best(rates, "own", ["lucky", "steady"], 0.95)
    assert found.label == "lucky"
    assert found.ratio.middle == pytest.approx(2.0)  # on the other half it was bad luck


def test_bounds_hold_as_often_as_they_say():
    rng, missed = random.Random(3), 0
    for seed in range(200):
        interval = bootstrap([rng.lognormvariate(0, 0.1) for _ in range(12)], 0.95, seed)
        missed += not interval.low <= 1 <= interval.high
    assert missed < 30
    assert joint_confidence(0.95, 10) == pytest.approx(0.995)


def steady(rate: float, seconds: float, step: float = 0.05) -> list[Step]:
    return [Step(step * (place + 1), round(rate * step)) for place in range(round(seconds / step))]


def after(first: list[Step], second: list[Step]) -> list[Step]:
    return first + [Step(first[-1].end + step.end, step.tokens) for step in second]


def test_a_slow_beginning_is_seen():
    steps = after(steady(40, 2.0), steady(100, 10.0))
    assert settled_rate(steps) == pytest.approx(100)
    assert 1.5 <= reaction_seconds(steps, aim=100) <= 3.0
    assert reaction_seconds(steps, aim=40) == 0.0  # where plain decoding makes 40
    assert worst_ratio(steps, plain_rate=80) == pytest.approx((2 * 40 + 3 * 100) / 5 / 80, rel=0.01)
    assert reaction_seconds(steady(100, 5.0), aim=100) == 0.0


def test_tokens_of_a_step_that_two_stretches_share_are_divided():
    rates = rates_by_second([Step(0.5, 10), Step(1.5, 20), Step(2.0, 10)], width=1.0, stride=1.0)
    assert rates == [(0.0, 20.0), (1.0, 20.0)]


@dataclass
class PretendLine:
    """Decodes at a rate by arm and phase; tells which circumstances it ran in."""

    log: list[str] = field(default_factory=list)

    def run(self, arm: ControlArm, phases: list[Phase]) -> list[list[Step]]:
        found = []
        for phase in phases:
            with phase.circumstances() as what:
                self.log.append(f"{arm.label} {phase.kind} {phase.batch} {what or ''}".strip())
            steps = steady(120 if arm.label == CONTROLLER else 100, phase.seconds)
            waited = 0.02 if arm.is_half else 0.01
            ended = [Ended(True, waited), *([Ended(False, 0.005)] if arm.is_half else [])]
            found.append([Step(step.end, step.tokens, (1.5 * waited,) * 3, ended) for step in steps])
        return found


def test_every_change_is_run_plainly_and_as_the_controller_likes():
    def made(what: str) -> AbstractContextManager[object]:
        return nullcontext(what)

    changes = conditions("code", "chat", 32, 8.0, lambda: made("slow"), lambda: made("busy"))
    line = PretendLine()
    reactions = measure_conditions(line, changes, OWN, nothing)
    assert [one.phase for one in reactions] == [
        "changed",
        "back",
        "slow",
        "back",
        "busy",
        "back",
        "32",
        "one again",
    ]
    assert all(one.ratio == pytest.approx(1.2) and one.worst == pytest.approx(1.2) for one in reactions)
    assert {"plain chat 1", "controller code 1 slow", "plain code 1 busy", "controller code 32"} <= set(
        line.log
    )


def test_mixed_traffic_compares_those_who_decode_plainly():
    mixed = measure_mixed(PretendLine(), OWN, 8, 3.0)
    assert (mixed.plain_ms, mixed.mixed_ms, mixed.ratio) == pytest.approx((10.0, 20.0, 2.0))
    assert (mixed.gap_ratio, mixed.others_gain) == pytest.approx((2.0, 2.0))
    report = ControlBenchReport([], mixed=mixed, probe_share=0.02)
    assert len(report.failures) == 2
    assert report.as_json()["passed"] is False
    assert percentile([5, 1, 3, 2, 4], 0.95) == 5
    assert percentile([1.0], 0.5) == 1.0


def test_a_brake_makes_calls_longer_and_nothing_else():
    clock, brake = ScriptedClock(), Brake()

    def propose(asks: list[Any]) -> list[Any]:
        clock.pass_by(0.1)
        return asks

    inner: Any = Drafter()
    inner.propose, inner.traits = propose, Traits(DraftSource.HEAD)
    drafter: Any = SlowedDrafter(inner, brake, clock, clock.pass_by)
    assert drafter.traits is inner.traits
    assert drafter.propose([[1]]) == [[1]]
    assert clock.now == pytest.approx(0.1)
    with brake.pulled(10.0):
        drafter.propose([[1]])
    assert clock.now == pytest.approx(1.1)
    drafter.propose([[1]])
    assert clock.now == pytest.approx(1.2)
    assert not drafter.choices


def test_of_several_drafters_each_is_behind_the_brake():
    brake = Brake()
    parts: Any = {"one": Drafter(), "other": Drafter()}
    whole: Any = slowed(RoutedDrafter(parts), brake)
    assert list(whole.choices) == ["one", "other"]
    assert all(isinstance(one, SlowedDrafter) for one in whole.choices.values())
    assert isinstance(slowed(parts["one"], brake), SlowedDrafter)


def test_prompts_go_round_and_mixed_is_all_of_them():
    prompts = Prompts({"a": [[1], [2], [3]], "b": [[4]]})
    assert prompts.kinds == ["a", "b", MIXED]
    assert prompts.take("a", 0, 2) == [[1], [2]]
    assert prompts.take("a", 1, 2) == [[3], [1]]
    assert {tuple(ids) for ids in prompts.take(MIXED, 0, 6)} == {(1,), (2,), (3,), (4,)}


def test_sizes():
    assert ControlSizes.of(False).batches == (1, 2, 4, 8, 16, 32)
    quick = ControlSizes.of(True, windows=4, changes=False)
    assert (quick.windows, quick.phase_seconds) == (4, 0.0)
    assert quick.chosen(["a", "b", "c"]) == ["a", "b", MIXED]
    assert ControlSizes.of(False).chosen(["a", "b", "c"]) == ["a", "b", "c", MIXED]
    with pytest.raises(RequestError, match="'poetry' is none of chat, mixed"):
        ControlSizes.of(True, ["poetry"]).check({"chat"})


def test_tables_and_chart():
    station = PretendStation({"plain": 10.0, CONTROLLER: 12.0, "ngram": 9.0})
    wanted = [("chat", 1), ("chat", 4), (MIXED, 1)]
    cells = measure_cells(station, wanted, [PLAIN_ARM, OWN, FIXED], 4, nothing)
    assert cell_table(cells, "title").row_count == 3
    assert ratio_chart(cells).lines == {
        "chat": [(1.0, pytest.approx(1.2)), (4.0, pytest.approx(1.2))],
        MIXED: [(1.0, pytest.approx(1.2))],
    }
    changes = conditions("code", "chat", 2, 8.0, nullcontext, nullcontext)
    reactions = measure_conditions(PretendLine(), changes, OWN, nothing)
    assert table(reactions, columns_of(reactions)).row_count == 8
    report = ControlBenchReport(cells, reactions)
    assert report.failures == []
    assert (
        table(report.verdicts, columns_of(report.verdicts)).row_count == len(report.as_json()["goals"]) == 7
    )


def cell(kind: str, batch: int, own: float, best: float) -> ControlCell:
    ratios = {CONTROLLER: Interval(own - 0.01, own, own + 0.01)}
    return ControlCell(
        kind, batch, 10.0, ratios, BestFixed("ngram", Interval(best - 0.01, best, best + 0.01)), 4
    )


def reaction(phase: str, seconds: float, within: float, worst: float) -> Reaction:
    return Reaction("batch grows", phase, seconds, within, 1.0, worst)


def test_every_goal_has_its_verdict_and_its_figure():
    cells = [cell("chat", 2, 0.97, 1.0), cell(MIXED, 2, 1.2, 0.97), cell("code", 8, 1.1, 0.9)]
    reactions = [reaction("8", 4.0, 3.0, 0.95), reaction("one again", 4.0, 10.0, 0.8)]
    mixed = MixedTraffic(8, 10.0, 10.6, 1.1, 1.2)
    report = ControlBenchReport(cells, reactions, mixed, 0.004)
    found = {one["goal"]: (one["holds"], one["figure"]) for one in report.as_json()["goals"]}
    assert found == {
        "every cell at least 0.99 of plain": (False, "chat, batch 2: 0.97 (0.96-0.98)"),
        "every cell at least 0.96 of the best fixed": (False, "code, batch 8: 0.90 (0.89-0.91)"),
        "mixed traffic above the best fixed": (False, "mixed, batch 2: 0.97 (0.96-0.98)"),
        "off within 3 s": (False, "batch grows (8): 4.0 s"),
        "on again within 10 s": (True, "batch grows (one again): 4.0 s"),
        "worst five seconds 0.9 of plain": (False, "batch grows (one again): 0.80"),
        "plain requests beside others: p95 at most 1.05": (False, "1.060"),
        "probes take at most 1% of the time": (True, "0.40%"),
    }
    assert len(report.failures) == 6
    assert "every cell at least 0.96 of the best fixed: code, batch 8: 0.90 (0.89-0.91)" in report.failures


def test_steps_that_read_prompts_do_not_count():
    steps = [Step(1.0, 10), Step(3.0, 2, reads=True), Step(4.0, 10)]
    assert [(step.end, step.tokens) for step in decoding(steps)] == [(1.0, 10), (2.0, 10)]
    reading = [Step(1.0, 2, reads=True)]
    assert decoding(reading) == reading


def test_windows_of_many_requests_are_shorter():
    assert [tokens_at(batch, 24) for batch in (1, 8, 16, 32)] == [24, 24, 12, 12]
