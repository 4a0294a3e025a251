"""Results of simulations as an HTML page, and a summary of autoscaling."""

import math
from collections.abc import Callable, Mapping, Sequence

from foreword.bench.pictures import Lines, chart, colours_of, html_page, section
from foreword.bench.skeleton import optional
from foreword.simulate.scenario import Autoscale, Scenario
from foreword.simulate.sweep import Point
from foreword.simulate.world import SAMPLE_SECONDS, SimulationResult


def scaling_summary(scenario: Scenario, outcome: SimulationResult) -> str:
    """Return one line about the number of nodes over time."""
    rule, nodes = scenario.autoscale, outcome.nodes_over_time
    assert rule is not None
    initial, wanted = nodes[0], outcome.nodes_wanted
    if min(nodes) != max(nodes):
        return f"--autoscale: nodes at first {initial}, at most {max(nodes)}, at the end {nodes[-1]}"
    if wanted is None or wanted == initial:
        return f"--autoscale changed nothing: by the ratio formula {initial} is the number of nodes for this load"
    return (
        f"--autoscale changed nothing: nodes wanted {wanted}, there {initial}, but "
        f"{_advise_duration(rule, wanted > initial)}"
    )


def _advise_duration(rule: Autoscale, adds_nodes: bool) -> str:
    """Return why the simulation ended before the autoscaler acted, and how long it must be."""
    if adds_nodes:
        needed = rule.up_after + rule.boot
        delay = (
            f"one is added after {rule.up_after:g} s of too few and drafts {rule.boot:g} s later (--boot-s)"
        )
    else:
        needed = rule.down_after
        delay = f"one is given back after {rule.down_after:g} s of too many"
    # The first tenth of the time is warm-up, and the load is checked every second.
    seconds = math.ceil((needed + 3 * SAMPLE_SECONDS) / 0.9)
    return f"{delay}: simulate --seconds {seconds} or more"


_COLUMNS: Mapping[str, Callable[[SimulationResult], str]] = {
    "tokens/s": lambda one: f"{one.tokens_per_second:.0f}",
    "per target": lambda one: f"{one.tokens_per_second_per_target:.0f}",
    "tokens/pass": lambda one: optional(one.tokens_per_pass, ".2f"),
    "ms/token p50": lambda one: optional(one.token_ms_p50, ".2f"),
    "p95": lambda one: optional(one.token_ms_p95, ".2f"),
    "latency p95": lambda one: "-" if one.latency_p95 is None else f"{one.latency_p95:.2f} s",
    "cost per million": lambda one: optional(one.cost_per_million, ".3g"),
}
_HEADS = ("who drafts", *_COLUMNS)
_FIGURES: tuple[tuple[str, Callable[[SimulationResult], float | None]], ...] = (
    ("tokens per second and target", lambda one: one.tokens_per_second_per_target),
    ("milliseconds per token, p95 of requests", lambda one: one.token_ms_p95),
    ("cost of a million tokens", lambda one: one.cost_per_million),
)


def simulation_page(
    scenario: Scenario,
    compared: Mapping[str, SimulationResult],
    points: Sequence[Point],
    about: Sequence[str],
) -> str:
    """Return a page with the comparison, charts over time, and three charts per axis."""
    fleet = scenario.fleet
    title = (
        f"simulated: {fleet.targets} targets, {fleet.nodes} draft nodes, batch {fleet.batch}, K {scenario.k}"
    )
    colours = colours_of(list(dict.fromkeys([*compared, *(point.who for point in points)])))
    rows = [_row(who, one) for who, one in compared.items()]
    sections = [section("as it is", _over_time(scenario, compared, colours), _HEADS, rows)]
    for axis in dict.fromkeys(point.axis for point in points):
        axis_points = [point for point in points if point.axis == axis]
        charts = [chart(f"{name} by {axis}", _lines(axis_points, read), colours) for name, read in _FIGURES]
        rows = [(f"{point.value:g}", *_row(point.who, point.outcome)) for point in axis_points]
        sections.append(section(f"over {axis}", charts, (axis, *_HEADS), rows))
    return html_page(title, about, colours, sections)


def _over_time(
    scenario: Scenario, compared: Mapping[str, SimulationResult], colours: Mapping[str, str]
) -> list[str]:
    """Return charts (SVG) of tokens per second and of draft nodes over time, by drafting variant."""

    def times(values: Sequence[float]) -> list[tuple[float, float]]:
        return [(number * scenario.seconds / len(values), value) for number, value in enumerate(values, 1)]

    tokens = {who: times(one.tokens_over_time) for who, one in compared.items()}
    nodes = {who: times(one.nodes_over_time) for who, one in compared.items() if any(one.nodes_over_time)}
    return [
        chart("tokens per second over time (s)", tokens, colours),
        chart("draft nodes over time (s)", nodes, colours),
    ]


def _lines(points: Sequence[Point], read: Callable[[SimulationResult], float | None]) -> Lines:
    """Return the chart's points by drafting variant; `read` returns a result's figure, None if not measured."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        if (value := read(point.outcome)) is not None:
            lines.setdefault(point.who, []).append((point.value, value))
    return lines


def _row(who: str, one: SimulationResult) -> tuple[str, ...]:
    return who, *(cell(one) for cell in _COLUMNS.values())
