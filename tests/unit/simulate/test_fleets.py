"""Fleets: failures, zones, load, autoscaling, money. Nothing here takes real time."""

import json
import re
from dataclasses import asdict, replace

import pytest

from foreword.bench.skeleton import optional
from foreword.errors import RequestError
from foreword.simulate.report import scaling_summary
from foreword.simulate.scenario import (
    AcceptanceCurve,
    Autoscale,
    DraftPlacement,
    Failure,
    FailureKind,
    FleetSize,
    HourlyPrices,
    Network,
    Scenario,
    Traffic,
)
from foreword.simulate.world import SimulationResult, World

SMALL = Scenario(FleetSize(targets=2, nodes=2, batch=4), traffic=Traffic(prompt=16, answer=64), seconds=4.0)


def run(scenario: Scenario) -> SimulationResult:
    return World(scenario).run()


def test_the_same_seed_gives_the_same_events_and_another_one_others():
    assert run(SMALL) == run(SMALL)
    assert run(SMALL).tokens != run(replace(SMALL, seed=1)).tokens


def test_every_session_that_is_left_belongs_to_a_request_that_is():
    world = World(replace(SMALL, failures=(Failure(FailureKind.KILL, 1, 2.0, 1.0),)))
    world.run()
    nodes = [node for target in world.targets for node in target.chains.assigned_nodes]
    assert [node.sessions for node in world.nodes] == [nodes.count(node.number) for node in world.nodes]


def test_nothing_is_told_of_tokens_where_there_were_none():
    found = run(replace(SMALL, traffic=Traffic((0.5,), prompt=10**9), seconds=1.0))
    assert found.tokens == 0
    assert (found.token_ms_p50, found.token_ms_p95, found.cost_per_million) == (None, None, None)
    assert (optional(None, ".2f"), optional(1.5, ".2f")) == ("-", "1.50")


@pytest.mark.parametrize("failure", ["kill:0@1+1", "kill:1@1+0", "kill:1@4+1", "hang:1@99"])
def test_a_failure_that_would_change_nothing_is_refused(failure: str):
    with pytest.raises(RequestError, match="changes nothing"):
        replace(SMALL, failures=(Failure.parse(failure),))


def test_nodes_that_are_gone_cost_guesses_and_not_more():
    """All dead for most of the time: between plain decoding and what it would be with them."""
    dead = replace(SMALL, failures=(Failure(FailureKind.KILL, 2, 1.0, 100.0),))
    with_nodes, without = run(SMALL), run(dead)
    plain = run(replace(SMALL, drafting=DraftPlacement.PLAIN))
    assert 0.97 * plain.tokens < without.tokens < 0.75 * with_nodes.tokens
    assert without.tokens_over_time[50] < 0.6 * with_nodes.tokens_over_time[50]


def test_a_node_that_hangs_is_waited_for_once_by_each_target():
    """Two targets, one node silent from 1 s on: one wait in vain each, and the rest goes on."""
    found = run(replace(SMALL, failures=(Failure(FailureKind.HANG, 1, 1.0, 100.0),)))
    assert 1 <= found.waits_in_vain <= 2
    assert found.moves == 0  # half a minute has not passed
    assert found.tokens > run(replace(SMALL, drafting=DraftPlacement.PLAIN)).tokens


def test_a_silent_node_counts_as_gone_after_half_a_minute_and_its_requests_move():
    long = replace(
        SMALL, fleet=FleetSize(1, 2, batch=4), traffic=Traffic(prompt=16, answer=1e9), seconds=34.0
    )
    found = run(replace(long, failures=(Failure(FailureKind.HANG, 1, 1.0, 100.0),)))
    assert found.moves > 0


def test_requests_move_when_their_node_dies_and_the_others_keep_their_home():
    long = replace(SMALL, traffic=Traffic(prompt=16, answer=1e9), seconds=8.0)
    world = World(replace(long, failures=(Failure(FailureKind.KILL, 1, 2.0, 100.0),)))
    found = world.run()
    assert found.moves == pytest.approx(4, abs=3)
    assert world.nodes[0].sessions == 0
    assert world.nodes[1].sessions == 8


def test_a_partition_cuts_off_the_other_zone_only():
    apart = replace(
        SMALL, fleet=replace(SMALL.fleet, zones=2), failures=(Failure(FailureKind.PARTITION, 2, 1.0, 100.0),)
    )
    assert run(apart).waits_in_vain == 0  # homes are near, so that nothing is cut off
    everybody_far = replace(apart, fleet=replace(apart.fleet, targets=4, nodes=1), failures=(
        Failure(FailureKind.PARTITION, 1, 1.0, 100.0),))  # fmt: skip
    assert run(everybody_far).waits_in_vain > 0  # the targets of zone 1 have their homes in zone 0


def test_slow_nodes_make_fewer_levels():
    slow = run(replace(SMALL, failures=(Failure(FailureKind.SLOW, 2, 0.0, 100.0),)))
    assert slow.tokens < 0.9 * run(SMALL).tokens


def test_a_failure_ends_without_those_that_began_in_the_meantime():
    """The only node is slow for a second, and dies in this time for longer."""
    failures = (Failure(FailureKind.SLOW, 1, 1.0, 1.0), Failure(FailureKind.KILL, 1, 1.5, 2.0))
    world = World(replace(SMALL, fleet=replace(SMALL.fleet, nodes=1), failures=failures))
    found = world.run()
    assert found.nodes_over_time[30:45] == (0,) * 15  # from 2 to 3 of 4 seconds
    assert found.nodes_over_time[-1] == 0  # the newest sample is of second 3
    (node,) = world.nodes
    assert (node.is_dead, node.factor) == (False, 1.0)


def test_nodes_that_are_not_slow_fail_first():
    failures = (Failure(FailureKind.SLOW, 1, 1.0, 9.0), Failure(FailureKind.SLOW, 1, 2.0, 9.0))
    world = World(replace(SMALL, failures=failures))
    world.run()
    assert [node.factor for node in world.nodes] == [10.0, 10.0]


def test_far_zones_cost():
    two = replace(SMALL, fleet=replace(SMALL.fleet, targets=4, nodes=1, zones=2))
    near = run(replace(two, network=Network(zone_round_trip=0.3e-3)))
    far = run(replace(two, network=Network(zone_round_trip=20e-3)))
    assert far.tokens < 0.95 * near.tokens


def test_money_is_the_reserved_time_of_both_pools():
    found = run(replace(SMALL, prices=HourlyPrices(target=36.0, node=3.6)))
    per_second = (2 * 36 + 2 * 3.6) / 3600
    assert found.cost_per_million == pytest.approx(per_second / found.tokens_per_second * 1e6)


def test_requests_that_come_faster_than_they_go_wait():
    calm = run(replace(SMALL, traffic=Traffic((4.0,), 16, 64), seconds=10.0))
    busy = run(replace(SMALL, traffic=Traffic((40.0,), 16, 64), seconds=10.0))
    assert calm.tokens_per_second == pytest.approx(4 * 64, rel=0.5)  # forty requests, of any length
    assert calm.latency_p95 is not None
    assert busy.latency_p95 is not None
    assert busy.latency_p95 > 3 * calm.latency_p95


def test_a_rate_begins_on_time_after_a_lower_one():
    """At the low rate a request comes every thousand seconds, at the high one a hundred come in the second half."""
    rising = replace(SMALL, traffic=Traffic((0.001, 50.0), prompt=0, answer=1.0))
    found = [run(replace(rising, seed=seed)).requests for seed in range(8)]
    assert all(70 <= requests <= 130 for requests in found)


def test_nodes_are_taken_on_when_the_formula_wants_them_and_given_back_later():
    """Two targets of 16, each node takes 8 requests; later there is little to do."""
    fleet = FleetSize(targets=2, nodes=1, batch=16, capacity=8)
    rule = Autoscale(boot=1.0, up_after=2.0, down_after=3.0)
    growing = replace(SMALL, fleet=fleet, autoscale=rule, traffic=Traffic((40.0, 1.0), 16, 64), seconds=20.0)
    world = World(growing)
    found = world.run()
    assert max(found.nodes_over_time) >= 3
    assert found.nodes_over_time[-1] < max(found.nodes_over_time)
    assert any(node.started_at > 2 for node in world.nodes)
    assert scaling_summary(growing, found).startswith("--autoscale: nodes at first 1, at most")


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        (1, "nodes wanted 2, there 1, but one is added after 10 s .* simulate --seconds 82 or more"),
        (3, "nodes wanted 2, there 3, but one is given back .* simulate --seconds 337 or more"),
        (2, "changed nothing: by the ratio formula 2 "),
    ],
)
def test_an_autoscaler_that_does_nothing_says_why(nodes: int, why: str):
    fleet = FleetSize(targets=2, nodes=nodes, batch=4, capacity=4)
    scenario = replace(SMALL, fleet=fleet, autoscale=Autoscale())
    assert re.search(why, scaling_summary(scenario, run(scenario)))


def test_kinds_of_work_are_dealt_out_in_turn():
    """A kind that is always right and one that never is: half of the requests gain all guesses."""
    mixed = replace(
        SMALL,
        drafting=DraftPlacement.LOCAL,
        kinds=(AcceptanceCurve.of_rate(1.0), AcceptanceCurve.of_rate(0.0)),
        k=3,
    )
    endless = run(replace(mixed, traffic=Traffic(prompt=0, answer=1e9)))
    assert endless.tokens_per_pass == pytest.approx((4 + 1) / 2, rel=0.01)


def test_drafts_that_are_not_always_there():
    """Half of the drafts are empty, the other half has two guesses, all of them right."""
    sparse = replace(
        SMALL, drafting=DraftPlacement.LOCAL, kinds=(AcceptanceCurve((1.0, 1.0), (0.5, 0.5, 0.0)),)
    )
    found = run(replace(sparse, traffic=Traffic(prompt=0, answer=1e9)))
    assert found.tokens_per_pass == pytest.approx(2.0, rel=0.05)


def test_hundreds_of_machines_take_one_event_per_pass():
    many = replace(SMALL, fleet=FleetSize(targets=200, nodes=50, zones=4, batch=16), seconds=0.1)
    found = run(many)
    assert found.events < 200 * (0.1 / 0.015 + 1) + 2
    assert found.tokens_per_second_per_target > 100


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("kill:2@10+5", Failure(FailureKind.KILL, 2, 10.0, 5.0)),
        ("hang:1@0.5", Failure(FailureKind.HANG, 1, 0.5)),
    ],
)
def test_failures_are_read(text: str, failure: Failure):
    assert Failure.parse(text) == failure
    json.dumps(asdict(failure), allow_nan=False)  # Infinity is not JSON


@pytest.mark.parametrize("text", ["", "kill", "eat:1@2", "kill:1", "kill:x@2", "kill:1@..+2", "kill:1@2+"])
def test_failures_that_are_none_are_told_how_to_write_them(text: str):
    with pytest.raises(RequestError, match="kill:2@10"):
        Failure.parse(text)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"k": 0}, "--k"),
        ({"seconds": 0.0}, "--seconds"),
        ({"fleet": FleetSize(targets=0)}, "--targets"),
        ({"traffic": Traffic((0.0,))}, "--rate"),
        ({"failures": (Failure(FailureKind.KILL, 9, 1.0, 1.0),)}, "there are 2 nodes"),
        ({"failures": (Failure(FailureKind.PARTITION, 1, 1.0, 1.0),)}, "--zones"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(change: dict, told: str):
    with pytest.raises(RequestError, match=told):
        replace(SMALL, **change)
