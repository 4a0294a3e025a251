"""How long a pass waits: while one more level is worth what the others lose."""

from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from foreword.cluster.pairing import FIRST_ANSWER, expected_arrivals, may_come
from foreword.cluster.waiting import (
    UNKNOWN_SECONDS,
    ExpectedArrival,
    NodeEstimates,
    TokenRate,
    best_wait_seconds,
    longest_wait_seconds,
)
from foreword.speculation.draft import Draft


def coming(
    requests=1, at_hand=0, wanted=4, rate=0.8, first=0.002, level=0.001, late_after=inf
) -> ExpectedArrival:
    survival = tuple(rate ** (depth + 1) for depth in range(8))
    return ExpectedArrival(requests, at_hand, wanted, survival, first, level, late_after)


def test_nothing_on_its_way_is_not_waited_for():
    assert best_wait_seconds([], 100.0) == 0
    assert best_wait_seconds([coming(at_hand=4)], 100.0) == 0


def test_a_slow_target_waits_for_all_levels_and_a_fast_one_for_none():
    assert best_wait_seconds([coming()], 10.0) == pytest.approx(0.005)  # the fourth level comes then
    assert best_wait_seconds([coming()], 10_000.0) == 0


def test_levels_are_waited_for_as_long_as_each_brings_more_than_it_costs():
    # At 600 tokens per second a level costs 0.6: only 0.8 and 0.64 bring more, and the first one 1.2.
    assert best_wait_seconds([coming(first=0.001)], 600.0) == pytest.approx(0.002)


def test_one_late_request_of_many_holds_the_pass_up_by_little():
    """Sixteen requests make 3 tokens per ms: what one of them could gain is worth less than a millisecond."""
    assert best_wait_seconds([coming(requests=1, first=0.002)], 3000.0) == 0
    assert best_wait_seconds([coming(requests=16, first=0.002)], 3000.0) > 0
    assert longest_wait_seconds([coming(requests=1)], 3000.0) < 0.001


def test_nobody_waits_longer_than_until_the_node_is_late():
    assert best_wait_seconds([coming(first=0.002, late_after=0.001)], 10.0) == 0
    assert longest_wait_seconds([coming(late_after=0.0035)], 10.0) == pytest.approx(
        0.0065
    )  # the last of four levels is late


def test_levels_behind_the_next_may_come_later_than_that_one():
    """A first level would be late after 3.5 ms; the fourth usually comes after 5."""
    assert best_wait_seconds([coming(late_after=0.0035)], 10.0) == pytest.approx(0.005)


def test_a_wait_never_costs_more_than_all_that_could_come():
    every = [coming(requests=3), coming(requests=2, at_hand=2)]
    gain = 3 * (0.8 + 0.64 + 0.512 + 0.4096) + 2 * (0.512 + 0.4096)
    assert longest_wait_seconds(every, 100.0) == pytest.approx(gain / 100)
    assert best_wait_seconds(every, 100.0) <= longest_wait_seconds(every, 100.0)


def test_a_node_is_late_after_three_times_what_it_almost_never_takes():
    estimates = NodeEstimates()
    assert estimates.late_after is None
    for number in range(100):
        estimates.record_first(0.001 + number * 1e-5)
    assert estimates.late_after == pytest.approx(3 * 0.00198)
    for _ in range(200):
        estimates.record_first(0.05)  # it has become slower, and that is known by now
    assert estimates.late_after == pytest.approx(0.15)


def test_a_quick_answer_makes_no_earlier_one_late():
    """Of few times, all but the largest are under no percentile worth the name."""
    estimates = NodeEstimates()
    for count, seconds in enumerate((0.02, 0.001, 0.001, 0.001)):
        estimates.record_first(seconds)
        assert estimates.late_after == pytest.approx(0.06), count
    for _ in range(8):
        estimates.record_first(0.001)
    assert estimates.late_after == pytest.approx(0.003)  # one pause among many


def test_survival_is_learned_from_what_came():
    estimates = NodeEstimates()
    text = [1, 2, 3, 4, 5]
    for _ in range(200):
        estimates.judge(Draft.chain([4, 9, 9], 3), text[3:])
    first, second = estimates.survival(2)
    assert first > 0.95
    assert second < 0.1
    assert estimates.judged == 200


def test_a_tree_is_judged_along_the_path_that_the_text_took():
    estimates = NodeEstimates()
    tree = Draft((7, 4, 5), (-1, -1, 1), 3)
    for _ in range(200):
        estimates.judge(tree, [4, 5])
    assert estimates.survival(2)[1] > 0.95


def test_a_draft_that_nothing_followed_yet_says_nothing():
    estimates = NodeEstimates()
    estimates.judge(Draft.chain([4], 3), [])
    estimates.judge(Draft(), [1, 2, 3])
    assert estimates.judged == 0


def test_the_rate_is_of_tokens_that_came_between_two_asks():
    rate = TokenRate()
    assert rate.per_second is None
    rate.record(0, 10.0)
    rate.record(4, 10.5)
    assert rate.per_second == pytest.approx(8.0)
    rate.record(0, 10.6)
    assert rate.per_second == pytest.approx(8.0)
    rate.record(4, 11.0)
    assert rate.per_second == pytest.approx(8.0)
    rate.record(0, 90.0)  # nothing was to be done
    rate.record(4, 90.5)
    assert rate.per_second == pytest.approx(8.0)


def test_the_rate_is_the_same_where_several_ask_in_one_step():
    alone, together = TokenRate(), TokenRate()
    for step in range(50):
        alone.record(2, 0.01 * step)
        together.record(1, 0.01 * step)
        together.record(1, 0.01 * step + 50e-6)
    assert together.per_second == pytest.approx(alone.per_second, rel=0.1)


def node_of(**changes: Any) -> Any:
    """A node that answers 2 ms after an ask, and then has a level every half millisecond."""
    estimates = NodeEstimates()
    for _ in range(20):
        estimates.record_first(0.002)
        estimates.record_level(0.0005)
    facts = {"estimates": estimates, "breaker": SimpleNamespace(is_open=False), "has_timed_out": False}
    return SimpleNamespace(**{"name": "node", **facts, **changes})


def pairing_of(peer: Any, requested_at: float | None, level_at: float = 5.0) -> Any:
    return SimpleNamespace(
        peer=peer,
        is_warm=True,
        is_all=False,
        requested_at=requested_at,
        level_at=level_at,
        draft_after=lambda _: Draft(),
    )


def only_prospect(pairings: list[Any], now: float, depth: int = 4, nodes: int = 4) -> ExpectedArrival:
    asked: Any = SimpleNamespace(request=None, max_depth=depth, max_nodes=nodes)
    (found,) = expected_arrivals([(asked, one) for one in pairings], now, shadow=0).values()
    return found


def test_a_node_that_never_answered_is_late_soon():
    """However dear a token seems to be: after an idle hour the first one does."""
    found = only_prospect([pairing_of(node_of(estimates=NodeEstimates()), requested_at=5.0)], now=5.0)
    assert found.late_after == FIRST_ANSWER
    assert longest_wait_seconds([found], tokens_per_second=1 / 3600) <= FIRST_ANSWER + 3 * UNKNOWN_SECONDS


def test_a_first_level_is_late_by_the_time_since_it_was_asked_for():
    asked = [pairing_of(node_of(), requested_at=5.0)]
    assert only_prospect(asked, now=5.0).late_after == pytest.approx(0.006)
    later = only_prospect(asked, now=5.0015)
    assert later.late_after == pytest.approx(0.0045)
    assert later.first_seconds == pytest.approx(0.0005)


def test_the_next_level_of_a_chain_is_expected_after_the_one_before():
    found = only_prospect([pairing_of(node_of(), requested_at=None, level_at=5.0)], now=5.0002)
    assert found.first_seconds == pytest.approx(0.0003)
    assert found.late_after == pytest.approx(0.006)  # of a chain that goes on nobody was asked anything


@pytest.mark.parametrize(("requested_at", "left"), [(5.0, 0.25 * 0.002), (None, 0.25 * 0.0005)])
def test_what_should_be_there_already_is_expected_soon_but_not_at_once(
    requested_at: float | None, left: float
):
    found = only_prospect([pairing_of(node_of(), requested_at)], now=5.004)
    assert found.first_seconds == pytest.approx(left)


def test_levels_are_wanted_as_far_as_depth_and_nodes_both_reach():
    asked = [pairing_of(node_of(), requested_at=5.0)]
    assert only_prospect(asked, now=5.0, depth=2, nodes=6).wanted == 2
    assert only_prospect(asked, now=5.0, depth=6, nodes=3).wanted == 3


def test_who_is_not_waited_for():
    def comes(**changes: Any) -> bool:
        return may_come(pairing_of(node_of(**changes), requested_at=5.0), shadow=0)

    assert comes()
    assert not comes(has_timed_out=True)
    assert not comes(breaker=SimpleNamespace(is_open=True))
    assert not may_come(pairing_of(node_of(), requested_at=5.0), shadow=1)


@pytest.mark.parametrize("late_first", [True, False])
def test_one_that_is_late_keeps_nobody_from_being_waited_for(late_first: bool):
    peer = node_of()
    late, fresh = pairing_of(peer, 4.9), [pairing_of(peer, 5.0) for _ in range(7)]
    found = only_prospect([late, *fresh] if late_first else [*fresh, late], now=5.0)
    assert found.requests == 7
    assert best_wait_seconds([found], tokens_per_second=200) == pytest.approx(0.002 + 3 * 0.0005)


def test_one_pause_between_levels_is_no_change():
    estimates = NodeEstimates()
    for _ in range(20):
        estimates.record_level(0.0005)
    estimates.record_level(5.0)
    assert estimates.level_seconds is not None
    assert estimates.level_seconds < 0.001
    at_once = NodeEstimates()
    at_once.record_level(0.0)
    for _ in range(60):
        at_once.record_level(0.004)
    assert at_once.level_seconds == pytest.approx(0.004, rel=0.1)  # and what has really changed is learned
