"""One scenario, varied along one axis at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from foreword.progress import StageProgress
from foreword.simulate.guessing import Guessing
from foreword.simulate.outcome import Outcome
from foreword.simulate.scenario import Drafting, Scenario
from foreword.simulate.world import World

IN_STEP = "no run-ahead"
"""Draft nodes that draft while their targets wait."""


@dataclass(frozen=True)
class Axis:
    """Something that is varied."""

    name: str
    values: tuple[float, ...]
    vary: Callable[[Scenario, float], Scenario]


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    axis: str
    value: float
    who: str  # drafts
    outcome: Outcome


def axes_of(scenario: Scenario, points: int = 5) -> list[Axis]:
    """Draft nodes for each target, distance, acceptance, K and batch, around what the scenario has."""
    targets, network = scenario.fleet.targets, scenario.network
    least = max((failure.nodes for failure in scenario.failures), default=1)  # that there are to fail
    ratios = sorted({max(round(targets * part), least) for part in (0.125, 0.25, 0.5, 1.0, 2.0)})[:points]
    return [
        Axis(
            "draft nodes per target",
            tuple(nodes / targets for nodes in ratios),
            lambda one, x: replace(one, fleet=replace(one.fleet, nodes=max(round(x * targets), 1))),
        ),
        Axis(
            "network round trip (ms)",
            (0.1, 0.5, 2.0, 5.0, 10.0)[:points],
            lambda one, x: replace(one, network=replace(network, round_trip=x / 1e3)),
        ),
        Axis(
            "acceptance",
            (0.4, 0.6, 0.7, 0.8, 0.9)[:points],
            lambda one, x: replace(one, kinds=(Guessing.of_rate(x),)),
        ),
        Axis("guesses per pass (K)", (1, 3, 5, 8, 12)[:points], lambda one, x: replace(one, k=int(x))),
        Axis(
            "requests at once (batch)",
            (1, 4, 16, 32, 64)[:points],
            lambda one, x: replace(one, fleet=replace(one.fleet, batch=int(x))),
        ),
    ]


def ways(scenario: Scenario) -> dict[str, Scenario]:
    """The same traffic, guessed for by nobody, by the targets themselves and by nodes, where there are any."""
    has_nodes = scenario.fleet.nodes > 0 or scenario.autoscale is not None
    found = {
        who.value: replace(scenario, drafting=who)
        for who in Drafting
        if has_nodes or who is not Drafting.REMOTE
    }
    if scenario.runs_ahead and has_nodes:
        found[IN_STEP] = replace(scenario, drafting=Drafting.REMOTE, runs_ahead=False)
    return found


def compare_ways(scenario: Scenario, on_progress: StageProgress) -> dict[str, Outcome]:
    """All of them, on the scenario as it is."""
    found, ordered = {}, ways(scenario)
    for number, (who, one) in enumerate(ordered.items()):

        def show(done: int, total: int, who: str = who, number: int = number) -> None:
            on_progress(who, number * total + done, len(ordered) * total)

        found[who] = World(one).run(show)
    return found


def sweep(scenario: Scenario, axes: Sequence[Axis], on_progress: StageProgress) -> list[Point]:
    """Every value of every axis; where an axis does not matter to somebody, that one runs once."""
    runs = [
        (axis, value, who, one)
        for axis in axes
        for value in axis.values
        for who, one in ways(axis.vary(scenario, value)).items()
    ]
    known: dict[Scenario, Outcome] = {}
    points = []
    for number, (axis, value, who, one) in enumerate(runs):
        on_progress(f"{axis.name} {value:g}, {who}", number, len(runs))
        relevant = _relevant(one)
        if relevant not in known:
            known[relevant] = World(relevant).run()
        points.append(Point(axis.name, value, who, known[relevant]))
    return points


def _relevant(scenario: Scenario) -> Scenario:
    """Without what plain and local decoding do not depend on."""
    plain = Scenario()
    if scenario.drafting is Drafting.REMOTE:
        return scenario
    fleet = replace(scenario.fleet, nodes=0)
    alike = replace(
        scenario, fleet=fleet, network=plain.network, failures=(), autoscale=None, runs_ahead=True
    )
    if scenario.drafting is Drafting.LOCAL:
        return alike
    return replace(alike, kinds=plain.kinds, k=plain.k)
