"""Sweeps, and the page."""

from dataclasses import replace
from xml.etree import ElementTree

from foreword.simulate.report import simulation_page
from foreword.simulate.scenario import DraftPlacement, Failure, FailureKind, FleetSize, Scenario, Traffic
from foreword.simulate.sweep import NO_RUN_AHEAD, Axis, axes_of, compare_drafting, drafting_variants, sweep

SMALL = Scenario(FleetSize(targets=2, nodes=1, batch=2), traffic=Traffic(prompt=0, answer=32), seconds=0.5)


def short_axes(scenario: Scenario, points: int) -> list[Axis]:
    """Return the axes with their first values only."""
    return [replace(axis, values=axis.values[:points]) for axis in axes_of(scenario)]


def test_every_axis_varies_what_its_name_says():
    changed = {axis.name: [axis.vary(SMALL, value) for value in axis.values] for axis in axes_of(SMALL)}
    read = {
        "draft nodes per target": lambda one: one.fleet.nodes / one.fleet.targets,
        "network round trip (ms)": lambda one: one.network.round_trip * 1e3,
        "acceptance": lambda one: one.kinds[0].survival[0],
        "draft tokens per pass (K)": lambda one: one.k,
        "requests at once (batch)": lambda one: one.fleet.batch,
    }
    for axis in axes_of(SMALL):
        assert [read[axis.name](one) for one in changed[axis.name]] == list(axis.values)


def test_four_ways_to_draft_and_three_without_running_ahead():
    assert list(drafting_variants(SMALL)) == ["plain", "local", "remote", NO_RUN_AHEAD]
    assert not drafting_variants(SMALL)[NO_RUN_AHEAD].runs_ahead
    assert list(drafting_variants(replace(SMALL, runs_ahead=False))) == [who.value for who in DraftPlacement]


def test_without_nodes_nobody_is_asked_and_a_sweep_still_has_them():
    alone = replace(SMALL, fleet=replace(SMALL.fleet, nodes=0))
    assert list(drafting_variants(alone)) == ["plain", "local"]
    ratios, network = short_axes(alone, 1)[:2]
    points = sweep(alone, [ratios, network], lambda *_: None)
    assert [point.who for point in points] == ["plain", "local", "remote", NO_RUN_AHEAD, "plain", "local"]
    assert "remote" in simulation_page(alone, compare_drafting(alone, lambda *_: None), points, [])


def test_there_are_never_fewer_nodes_than_fail():
    failing = replace(
        SMALL,
        fleet=replace(SMALL.fleet, targets=8, nodes=2),
        failures=(Failure(FailureKind.KILL, 2, 0.1, 0.1),),
    )
    assert axes_of(failing)[0].values[0] == 2 / 8


def test_a_sweep_runs_once_what_an_axis_does_not_change():
    axes = [axis for axis in short_axes(SMALL, 2) if axis.name.startswith(("network", "acceptance"))]
    points = sweep(SMALL, axes, lambda *_: None)
    assert len(points) == 2 * 2 * 4
    plain = {id(point.outcome) for point in points if point.who == "plain"}
    local = {
        id(point.outcome) for point in points if point.who == "local" and point.axis.startswith("network")
    }
    assert len(plain) == len(local) == 1
    assert len({id(point.outcome) for point in points if point.who == "remote"}) == 4


def test_the_page_needs_nothing_else():
    told: list[tuple[str, int, int]] = []
    compared = compare_drafting(SMALL, lambda *one: told.append(one))
    points = sweep(SMALL, short_axes(SMALL, 2)[:2], lambda *one: told.append(one))
    page = simulation_page(SMALL, compared, points, ["illustrative <costs>"])
    assert "http" not in page
    assert "illustrative &lt;costs&gt;" in page
    for words in (
        "over network round trip (ms)",
        "over draft nodes per target",
        "p95",
        "cost of a million tokens",
    ):
        assert words in page
    pictures = page.split("<svg")[1:]
    assert len(pictures) == 2 + 2 * 3
    for picture in pictures:
        ElementTree.fromstring("<svg" + picture.split("</svg>")[0] + "</svg>")
    assert all(done <= total for _, done, total in told)
