"""Which node drafts for which request."""

from collections import Counter

from foreword.cluster.assignment import LOAD_BOUND, MoveBudget, Place, choose_home, distance


def spread(requests: int, names: list[str], capacity: int = 1000) -> dict[int, str]:
    """Homes of requests that come one after the other."""
    homes: dict[int, str] = {}
    for request in range(requests):
        counts = Counter(homes.values())
        found = choose_home(request, [Place(name, capacity, counts[name]) for name in names])
        assert found is not None
        homes[request] = found
    return homes


def test_the_same_request_has_the_same_home_whoever_asks():
    places = [Place("a", 10, 3), Place("b", 10, 3), Place("c", 10, 3)]
    assert all(choose_home(n, places) == choose_home(n, places[::-1]) for n in range(50))


def test_no_node_has_much_more_than_its_share():
    counts = Counter(spread(400, ["a", "b", "c", "d"]).values())
    assert max(counts.values()) <= LOAD_BOUND * 100 + 1


def test_when_a_node_leaves_only_its_requests_get_another_home():
    """But for those that the bound on load moves, which a node that has room does not."""
    all_three = [Place(name, 10**6, 100) for name in "abc"]
    before = {n: choose_home(n, all_three) for n in range(300)}
    after = {n: choose_home(n, all_three[:2]) for n in range(300)}
    assert all(after[n] == before[n] for n in before if before[n] != "c")
    assert {after[n] for n in before if before[n] == "c"} == {"a", "b"}


def test_a_larger_node_has_more_homes():
    places = [Place("small", 100, 0), Place("large", 300, 0)]
    counts = Counter(choose_home(n, places) for n in range(2000))
    assert 0.65 < counts["large"] / 2000 < 0.85


def test_near_nodes_come_first_and_far_ones_take_what_they_cannot():
    near, far = Place("near", 2, 1, distance=0), Place("far", 100, 0, distance=3)
    assert choose_home(1, [near, far]) == "near"
    assert choose_home(1, [Place("near", 2, 2), far]) == "far"
    assert choose_home(1, [Place("near", 2, 2), Place("far", 1, 1, 3)]) is None
    assert choose_home(1, []) is None
    assert choose_home(1, [Place("none", 0, 0)]) is None


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
