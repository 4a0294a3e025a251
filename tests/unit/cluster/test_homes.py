"""Which node drafts for which request."""

from collections import Counter

from foreword.cluster.assignment import LOAD_BOUND, MoveBudget, NodeCandidate, assign_node, distance


def spread(requests: int, names: list[str], capacity: int = 1000) -> dict[int, str]:
    """Homes of requests that come one after the other."""
    homes: dict[int, str] = {}
    for request in range(requests):
        counts = Counter(homes.values())
        found = assign_node(request, [NodeCandidate(name, capacity, counts[name]) for name in names])
        assert found is not None
        homes[request] = found
    return homes


def test_the_same_request_has_the_same_home_whoever_asks():
    places = [NodeCandidate("a", 10, 3), NodeCandidate("b", 10, 3), NodeCandidate("c", 10, 3)]
    assert all(assign_node(n, places) == assign_node(n, places[::-1]) for n in range(50))


def test_no_node_has_much_more_than_its_share():
    counts = Counter(spread(400, ["a", "b", "c", "d"]).values())
    assert max(counts.values()) <= LOAD_BOUND * 100 + 1


def test_when_a_node_leaves_only_its_requests_get_another_home():
    """But for those that the bound on load moves, which a node that has room does not."""
    all_three = [NodeCandidate(name, 10**6, 100) for name in "abc"]
    before = {n: assign_node(n, all_three) for n in range(300)}
    after = {n: assign_node(n, all_three[:2]) for n in range(300)}
    assert all(after[n] == before[n] for n in before if before[n] != "c")
    assert {after[n] for n in before if before[n] == "c"} == {"a", "b"}


def test_a_larger_node_has_more_homes():
    places = [NodeCandidate("small", 100, 0), NodeCandidate("large", 300, 0)]
    counts = Counter(assign_node(n, places) for n in range(2000))
    assert 0.65 < counts["large"] / 2000 < 0.85


def test_near_nodes_come_first_and_far_ones_take_what_they_cannot():
    near, far = NodeCandidate("near", 2, 1, distance=0), NodeCandidate("far", 100, 0, distance=3)
    assert assign_node(1, [near, far]) == "near"
    assert assign_node(1, [NodeCandidate("near", 2, 2), far]) == "far"
    assert assign_node(1, [NodeCandidate("near", 2, 2), NodeCandidate("far", 1, 1, 3)]) is None
    assert assign_node(1, []) is None
    assert assign_node(1, [NodeCandidate("none", 0, 0)]) is None


def test_distance_is_by_what_both_have_in_common():
    ours = {"host": "h1", "rack": "r1", "zone": "z1"}
    assert distance(ours, {"host": "h1", "rack": "r1", "zone": "z1"}) == 0
    assert distance(ours, {"host": "h2", "rack": "r1", "zone": "z1"}) == 1
    assert distance(ours, {"host": "h2", "rack": "r2", "zone": "z1"}) == 2
    assert distance(ours, {"zone": "z2"}) == 3
    assert distance({}, {}) == 3


def test_a_twentieth_of_the_requests_moves_in_a_second():
    budget = MoveBudget(0.0)
    assert sum(budget.take(0.0, 200) for _ in range(50)) == 1
    assert sum(budget.take(1.0, 200) for _ in range(50)) == 10
    assert sum(budget.take(1.05, 200) for _ in range(50)) == 0
    assert sum(budget.take(9.0, 200) for _ in range(50)) == 10  # what was not used is not saved up
    assert sum(MoveBudget(0.0).take(float(second), 3) for second in range(5)) == 5  # one at least
