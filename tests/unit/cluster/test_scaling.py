"""How many draft nodes there should be, on a scripted clock."""

from dataclasses import replace

import pytest

from foreword.cluster.pools.autoscaling import DemandWatch
from foreword.cluster.pools.scaling import (
    Demand,
    NodeSpeed,
    Scaler,
    ScaleRule,
    nodes_needed,
    profitable_nodes,
    requests_served,
)
from helpers.clocks import ScriptedClock

RULE = ScaleRule("d", least=1, most=8, up_seconds=10, down_seconds=300)
FAST = NodeSpeed(0.8e-3, 0)  # a 1B model, by the paper's figures
SLOW = NodeSpeed(2e-3, 0)


def test_the_formula_gives_the_papers_ratios():
    plain = ScaleRule("d", ahead=1.0)
    assert requests_served(FAST, 18e-3, plain, 0.7) == pytest.approx(430, rel=0.02)
    assert requests_served(FAST, 18e-3, RULE, 0.7) == pytest.approx(115, rel=0.02)
    assert requests_served(SLOW, 18e-3, plain, 0.7) == pytest.approx(52, rel=0.02)
    assert requests_served(SLOW, 18e-3, RULE, 0.7) == pytest.approx(52, rel=0.02)  # ahead does not fit
    assert requests_served(NodeSpeed(1.0, 0), 18e-3, RULE, 0.7) == 1


def test_what_was_measured_under_load_counts_as_such_and_memory_is_a_bound():
    loaded = NodeSpeed(1.6e-3, 200)
    assert requests_served(loaded, 18e-3, RULE, 0.7) == requests_served(FAST, 18e-3, RULE, 0.7)
    bound = ScaleRule("d", kv_tokens=32_768, context=1024)
    assert requests_served(FAST, 18e-3, bound, 0.7) == 32


def test_targets_are_added_up_within_bounds():
    many = [Demand(64, 18e-3)] * 4
    assert nodes_needed(many, FAST, RULE, 0.7) == 3  # 256 requests, 115 a node
    assert nodes_needed([], FAST, RULE, 0.7) == 1
    assert nodes_needed(many * 10, FAST, RULE, 0.7) == 8


def looked(scaler: Scaler, clock: ScriptedClock, have: int, requests: float, seconds: float) -> list[int]:
    sizes = []
    for _ in range(round(seconds)):
        clock.pass_by(1.0)
        sizes.append(scaler.size(have, [Demand(requests, 18e-3)], FAST))
    return sizes


def test_it_goes_up_after_a_while_and_down_after_a_long_one():
    clock = ScriptedClock()
    scaler = Scaler(RULE, clock)
    assert looked(scaler, clock, 1, 256, 10) == [1] * 10
    assert looked(scaler, clock, 1, 256, 1) == [3]
    assert set(looked(scaler, clock, 3, 1, 300)) == {3}
    assert looked(scaler, clock, 3, 1, 1) == [2]
    assert set(looked(scaler, clock, 2, 1, 299)) == {2}
    assert looked(scaler, clock, 2, 1, 1) == [1]
    assert set(looked(scaler, clock, 1, 1, 700)) == {1}


def test_a_peak_that_passes_changes_nothing():
    clock = ScriptedClock()
    scaler = Scaler(RULE, clock)
    for _ in range(20):
        assert set(looked(scaler, clock, 2, 1000, 9)) == {2}
        assert set(looked(scaler, clock, 2, 150, 2)) == {2}
    for _ in range(3):
        assert set(looked(scaler, clock, 2, 0.5, 299)) == {2}
        assert set(looked(scaler, clock, 2, 150, 2)) == {2}


@pytest.mark.parametrize("requests", [1, 110, 120, 230, 340, 460, 900])
def test_the_answer_to_too_few_is_no_reason_for_fewer(requests: int):
    clock = ScriptedClock()
    scaler = Scaler(RULE, clock)
    sizes = [1]
    for _ in range(100):
        clock.pass_by(10.0)
        sizes.append(scaler.size(sizes[-1], [Demand(requests, 18e-3)], FAST))
    assert sizes == sorted(sizes)
    assert sizes[-1] == nodes_needed([Demand(requests, 18e-3)], FAST, RULE, RULE.use)


STEP = 18.01e-3
# 230 requests of such steps are two full nodes of 115; with 0.5 · (1 - 0.5^5) / 0.5 = 0.96875 tokens gained in each
# pass, a node adds 115 / STEP · 0.96875 tokens a second: 22.27 million an hour.
EARNING = NodeSpeed(0.8e-3, 0, acceptance=0.5)
EARNED = 115 / STEP * 0.96875 * 3600 / 1e6


def priced(node_price: float) -> ScaleRule:
    return replace(RULE, node_price=node_price, token_price=1.0)


def worth(requests: float, node_price: float, speed: NodeSpeed = EARNING, part: float = 1.0) -> int:
    return profitable_nodes([Demand(requests / 2, STEP)] * 2, speed, priced(node_price), part)


def test_nodes_are_added_while_each_earns_what_it_costs():
    assert requests_served(EARNING, STEP, RULE, 0.7) == 115
    assert worth(230, 0.99 * EARNED) == 2
    assert worth(230, 1.01 * EARNED) == 1  # none is worth it, and one is there in any case
    assert worth(230, 1.01 * EARNED, part=0.8) == 2
    # A third would have requests for two fifths of its time.
    assert worth(2.4 * 115, 0.39 * EARNED) == 3
    assert worth(2.4 * 115, 0.41 * EARNED) == 2
    assert worth(1000 * 115, 0.5 * EARNED) == RULE.most


def test_a_drafter_that_is_wrong_earns_nothing_and_one_that_nobody_knows_is_added_by_need():
    assert worth(230, 0.001, replace(EARNING, acceptance=0.0)) == 1
    assert worth(230, 1e9, FAST) == RULE.most
    assert worth(0, 1e9) == RULE.most  # nobody asks: need alone says how many
    assert profitable_nodes([Demand(230, STEP)], EARNING, RULE) == RULE.most  # nobody has said what it costs


@pytest.mark.parametrize(("price", "sizes"), [(0.9, [1, 2]), (1.1, [1, 1])])
def test_the_price_decides_whether_there_are_more(price: float, sizes: list[int]):
    clock = ScriptedClock()
    scaler = Scaler(priced(price * EARNED), clock)
    found = [scaler.size(1, [Demand(230, STEP)], EARNING)]
    clock.pass_by(10.0)
    assert [*found, scaler.size(1, [Demand(230, STEP)], EARNING)] == sizes


@pytest.mark.parametrize(("price", "size"), [(1.2, 2), (1.3, 1)])  # it stays while it earns 0.8 of its price
def test_a_node_goes_when_it_earns_far_less_than_it_costs(price: float, size: int):
    clock = ScriptedClock()
    scaler = Scaler(priced(price * EARNED), clock)
    scaler.size(2, [Demand(230, STEP)], EARNING)
    clock.pass_by(300.0)
    assert scaler.size(2, [Demand(230, STEP)], EARNING) == size


def test_nothing_changes_while_nobody_knows_how_fast_nodes_are_but_idle_ones_go():
    clock = ScriptedClock()
    scaler = Scaler(RULE, clock)
    for _ in range(1000):
        clock.pass_by(1.0)
        assert scaler.size(3, [Demand(100, 18e-3)], None) == 3
    sizes = []
    for _ in range(302):
        clock.pass_by(1.0)
        sizes.append(scaler.size(3, [Demand(0, 0.0)], None))
    assert sizes[-1] in (2, 3)
    assert 2 in sizes
    assert scaler.size(0, [], None) == 1


def test_demand_is_what_targets_say():
    told = {
        "http://a": {
            "engine": {"running": 16, "steps": 100},
            "usage": {"device_seconds": 2.0},
            "draft_nodes": [
                {"level_ms": 2.0, "homes": 8, "acceptance": 0.75},
                {"level_ms": None, "homes": 0, "acceptance": None},
            ],
        },
        "http://b": {"engine": {"running": 0, "steps": 5}, "usage": {"device_seconds": 1.0}},
    }

    def fetch(url: str) -> object:
        if (found := told.get(url.removesuffix("/health"))) is None:
            raise ConnectionRefusedError
        return found

    watch, urls = DemandWatch(fetch), ["http://a", "http://b", "http://c"]
    assert watch.read_demand(urls) == (
        [Demand(0, 0.0)],
        NodeSpeed(2e-3, 8, 0.75),
    )  # what a step takes is not known yet
    told["http://a"]["engine"]["steps"], told["http://a"]["usage"]["device_seconds"] = 150, 3.0
    assert watch.read_demand(urls)[0] == [Demand(16, 0.02), Demand(0, 0.0)]
    del told["http://a"]["usage"]  # hidden, or an older server
    assert watch.read_demand(urls) == ([Demand(0, 0.0)], None)
