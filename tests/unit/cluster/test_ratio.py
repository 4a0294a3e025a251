"""Draft nodes for so many requests, against the cases of the formula worked out by hand."""

import pytest

from foreword.cluster.pools.scaling import DraftWork, requests_per_node, wanted_draft_nodes


def level(first_ms: float):
    """t₀ (1 + m / 200)."""
    return lambda requests: first_ms / 1e3 * (1 + requests / 200)


def test_a_node_takes_as_many_requests_as_fit_into_its_part_of_a_step():
    """k 5, steps of 18.01 ms: 4 ms · (1 + m / 200) ≤ 12.607 ms for m ≤ 430; ahead, 8 ms · (1 + m / 200) for 115."""
    assert requests_per_node(DraftWork(5, 0.01801), level(0.8), 10_000) == 430
    assert requests_per_node(DraftWork(5, 0.01801, ahead=2), level(0.8), 10_000) == 115
    assert requests_per_node(DraftWork(5, 0.01801, utilisation=1.0), level(0.8), 10_000) == 700


def test_its_memory_is_a_limit_too():
    assert requests_per_node(DraftWork(5, 0.01801), level(0.8), 64) == 64


@pytest.mark.parametrize(("requests", "nodes"), [(0, 0), (1, 1), (430, 1), (431, 2), (4300, 10)])
def test_nodes_for_requests(requests: int, nodes: int):
    assert wanted_draft_nodes(requests, DraftWork(5, 0.01801), level(0.8), 10_000) == nodes


def test_a_drafter_that_is_too_slow_wants_no_nodes():
    slow = DraftWork(5, 0.01801, ahead=2)  # 20 ms of levels in a step of 18 ms
    assert requests_per_node(slow, level(2.0), 10_000) == 0
    assert wanted_draft_nodes(16, slow, level(2.0), 10_000) == 0
