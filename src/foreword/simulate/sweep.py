"""Varies one parameter of a scenario at a time, and finds the smallest fleet for a goal."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

from foreword.bench.skeleton import InTable, stage_of, staged
from foreword.errors import RequestError
from foreword.progress import StageProgress
from foreword.simulate.scenario import AcceptanceCurve, DraftPlacement, Scenario
from foreword.simulate.world import SimulationResult, World

NO_RUN_AHEAD = "no run-ahead"  # name of the drafting variant with draft nodes without run-ahead


@dataclass(frozen=True)
class Axis:
    """A varied parameter and its values."""

    name: str
    values: tuple[float, ...]
    vary: Callable[[Scenario, float], Scenario]


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    axis: str
    value: float
    who: str  # drafting variant: a `DraftPlacement` or NO_RUN_AHEAD
    outcome: SimulationResult


def axes_of(scenario: Scenario) -> list[Axis]:
    """Return axes around the scenario: nodes per target, round trip, acceptance, K and batch."""
    targets, network = scenario.fleet.targets, scenario.network
    least = max((failure.nodes for failure in scenario.failures), default=1)  # as many nodes as fail
    node_counts = sorted({max(round(targets * ratio), least) for ratio in (0.125, 0.25, 0.5, 1.0, 2.0)})
    return [
        Axis(
            "draft nodes per target",
            tuple(nodes / targets for nodes in node_counts),
            lambda one, x: replace(one, fleet=replace(one.fleet, nodes=max(round(x * targets), 1))),
        ),
        Axis(
            "network round trip (ms)",
            (0.1, 0.5, 2.0, 5.0, 10.0),
            lambda one, x: replace(one, network=replace(network, round_trip=x / 1e3)),
        ),
        Axis(
            "acceptance",
            (0.4, 0.6, 0.7, 0.8, 0.9),
            lambda one, x: replace(one, kinds=(AcceptanceCurve.of_rate(x),)),
        ),
        Axis("draft tokens per pass (K)", (1, 3, 5, 8, 12), lambda one, x: replace(one, k=int(x))),
        Axis(
            "requests at once (batch)",
            (1, 4, 16, 32, 64),
            lambda one, x: replace(one, fleet=replace(one.fleet, batch=int(x))),
        ),
    ]


def drafting_variants(scenario: Scenario) -> dict[str, Scenario]:
    """Return the scenario by drafting variant: plain, local and, if there are draft nodes, remote."""
    has_nodes = scenario.fleet.nodes > 0 or scenario.autoscale is not None
    variants = {
        who.value: replace(scenario, drafting=who)
        for who in DraftPlacement
        if has_nodes or who is not DraftPlacement.REMOTE
    }
    if scenario.runs_ahead and has_nodes:
        variants[NO_RUN_AHEAD] = replace(scenario, drafting=DraftPlacement.REMOTE, runs_ahead=False)
    return variants


def compare_drafting(scenario: Scenario, on_progress: StageProgress) -> dict[str, SimulationResult]:
    """Return the result of every drafting variant."""
    variants = drafting_variants(scenario)
    return {
        who: World(variant).run(stage_of(on_progress, who, index, len(variants)))
        for index, (who, variant) in enumerate(variants.items())
    }


def sweep(scenario: Scenario, axes: Sequence[Axis], on_progress: StageProgress) -> list[Point]:
    """Simulate every value of every axis with every drafting variant; equal scenarios are simulated once."""
    runs = [
        (axis.name, value, who, variant)
        for axis in axes
        for value in axis.values
        for who, variant in drafting_variants(axis.vary(scenario, value)).items()
    ]
    results: dict[Scenario, SimulationResult] = {}
    points = []
    for axis_name, value, who, variant in staged(runs, on_progress, "{0[0]} {0[1]:g}, {0[2]}".format):
        relevant = _relevant(variant)
        if relevant not in results:
            results[relevant] = World(relevant).run()
        points.append(Point(axis_name, value, who, results[relevant]))
    return points


def _relevant(scenario: Scenario) -> Scenario:
    """Return the scenario with defaults for the parameters that do not affect its drafting variant."""
    default = Scenario()
    if scenario.drafting is DraftPlacement.REMOTE:
        return scenario
    fleet = replace(scenario.fleet, nodes=0)
    without_nodes = replace(
        scenario, fleet=fleet, network=default.network, failures=(), autoscale=None, runs_ahead=True
    )
    if scenario.drafting is DraftPlacement.LOCAL:
        return without_nodes
    return replace(without_nodes, kinds=default.kinds, k=default.k)


class Vary(StrEnum):
    """Machines whose number is varied."""

    TARGETS = "targets"  # with draft nodes in proportion
    NODES = "nodes"  # for the scenario's targets


@dataclass(frozen=True)
class Goal:
    """Goals of a fleet; None: no goal."""

    tokens_per_second: float | None = None
    token_ms_p95: float | None = None  # mean time per token, by request

    def missed(self, result: SimulationResult) -> list[str]:
        """Describe the figures that miss a goal."""
        rate, p95, missed = result.tokens_per_second, result.token_ms_p95, []
        if self.tokens_per_second is not None and rate < self.tokens_per_second:
            missed.append(f"{rate:.0f} tokens/s")
        if self.token_ms_p95 is not None and (p95 is None or p95 > self.token_ms_p95):
            missed.append("no request ended" if p95 is None else f"p95 {p95:.2f} ms per token")
        return missed


@dataclass(frozen=True)
class FleetTrial:
    """Result of one simulated fleet."""

    who: Annotated[str, InTable("drafting")]  # drafting variant
    targets: Annotated[int, InTable("targets")]
    nodes: Annotated[int, InTable("nodes")]
    tokens_per_second: Annotated[float, InTable("tok/s", ".0f")]
    token_ms_p95: Annotated[float | None, InTable("ms/tok\np95", ".2f")]
    cost_per_hour: Annotated[float, InTable("cost per\nhour", "g")]
    # Descriptions of the figures that miss a goal; empty: all goals are reached.
    missed: Annotated[Sequence[str], InTable("goal", lambda missed: "missed" if missed else "reached")]


@dataclass(frozen=True)
class SmallestFleet:
    """The smallest fleet for one drafting variant."""

    who: str
    fleet: FleetTrial | None  # None: not reached within the limit
    why_not: str = ""  # reason if there is none


def find_fleets(
    scenario: Scenario, goal: Goal, vary: Vary, most: int, on_progress: StageProgress
) -> tuple[list[FleetTrial], list[SmallestFleet]]:
    """Return every simulated fleet, and the smallest one that reaches the goal for each drafting variant.

    The search doubles the number of machines until the goal is reached, then bisects. It assumes that more machines are
    never worse. `most` is the largest number that it tries.
    """
    _check(scenario, goal)
    trials: list[FleetTrial] = []
    answers = []

    def is_hopeless() -> bool:
        """Return whether more targets cannot help, because full batches are equally slow on every target."""
        p95, limit = trials[-1].token_ms_p95, goal.token_ms_p95
        is_slow = p95 is not None and limit is not None and p95 > limit
        return is_slow and vary is Vary.TARGETS and not scenario.traffic.rates

    for who in _drafting_choices(scenario, vary):
        known: dict[int, FleetTrial] = {}

        def reaches(count: int, who: DraftPlacement = who, known: dict[int, FleetTrial] = known) -> bool:
            on_progress(f"{who}: {count} {vary}", len(trials), len(trials) + 1)
            known[count] = _trial(replace(scenario, drafting=who), goal, vary, count)
            trials.append(known[count])
            return not known[count].missed

        start = scenario.fleet.targets if vary is Vary.TARGETS else max(scenario.fleet.nodes, 1)
        count, why_not = _least(reaches, start, most, is_hopeless), ""
        if count is None:
            missed = trials[-1].missed
            why_not = f"{' and '.join(missed)} with {most} {vary}; --goal-most allows no more"
            if is_hopeless():
                advice = "lower --batch, or give --rate"
                why_not = f"{missed[-1]} with full batches on any number of targets; {advice}"
        answers.append(SmallestFleet(who.value, None if count is None else known[count], why_not))
    return trials, answers


def _check(scenario: Scenario, goal: Goal) -> None:
    rates, wanted = scenario.traffic.rates, goal.tokens_per_second
    if rates and wanted is not None:
        offered = sum(rates) / len(rates) * scenario.traffic.answer
        if wanted > offered:
            raise RequestError(
                f"--goal-tokens-per-second {wanted:g}: --rate brings {offered:g} a second; raise it, or leave it out"
            )


def _drafting_choices(scenario: Scenario, vary: Vary) -> list[DraftPlacement]:
    if vary is Vary.NODES:
        return [DraftPlacement.REMOTE]
    return [who for who in DraftPlacement if who is not DraftPlacement.REMOTE or scenario.fleet.nodes]


def _least(
    reaches: Callable[[int], bool], start: int, most: int, is_hopeless: Callable[[], bool]
) -> int | None:
    """Return the smallest count from 1 to `most` that reaches the goal; None if there is none."""
    low, high = 0, min(start, most)
    while not reaches(high):
        if high == most or is_hopeless():
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


def _trial(scenario: Scenario, goal: Goal, vary: Vary, count: int) -> FleetTrial:
    """Simulate a fleet of `count` machines of the kind that is varied.

    If targets are varied, nodes are in proportion; there are at least as many nodes as fail.
    """
    fleet, prices = scenario.fleet, scenario.prices
    targets = count if vary is Vary.TARGETS else fleet.targets
    nodes = count if vary is Vary.NODES else math.ceil(count * fleet.nodes / fleet.targets)
    nodes = max([nodes, *(failure.nodes for failure in scenario.failures)])
    result = World(replace(scenario, fleet=replace(fleet, targets=targets, nodes=nodes))).run()
    used = nodes if scenario.drafting is DraftPlacement.REMOTE else 0
    return FleetTrial(
        who=scenario.drafting.value,
        targets=targets,
        nodes=used,
        tokens_per_second=result.tokens_per_second,
        token_ms_p95=result.token_ms_p95,
        cost_per_hour=targets * prices.target + used * prices.node,
        missed=goal.missed(result),
    )
