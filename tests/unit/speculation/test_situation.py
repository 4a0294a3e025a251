"""What a policy may look at."""

import pytest

from foreword.speculation.proposing import fair_shares
from foreword.speculation.situation import AcceptanceStats, StepCosts


def test_acceptance_is_counted_by_position():
    stats = AcceptanceStats()
    stats.observe(drafted=5, depth=5, accepted=2)
    stats.observe(drafted=7, depth=3, accepted=3)  # a tree
    stats.observe(drafted=0, depth=0, accepted=0)  # nobody guessed: says nothing
    assert (stats.drafts, stats.drafted, stats.accepted) == (2, 12, 5)
    assert stats.drafted_per_position == [2, 2, 2, 1, 1]
    assert stats.accepted_per_position == [2, 2, 1, 0, 0]
    assert stats.recent == pytest.approx(0.4 + (1.0 - 0.4) / 16)


def test_the_cost_of_a_pass_is_what_was_measured_between_and_beyond():
    costs = StepCosts()
    assert costs.pass_seconds(4) is None
    costs.observe_pass(1, 5.0)
    assert costs.pass_seconds(1) == 5.0
    assert costs.pass_seconds(6) == pytest.approx(10.0)  # twice the rows plus the prior's four
    costs.observe_pass(8, 12.0)
    assert costs.pass_seconds(8) == 12.0
    assert costs.pass_seconds(4) == pytest.approx(5 + 7 * 3 / 7)
    assert costs.pass_seconds(20) == pytest.approx(24.0)
    assert costs.curve() == [(1.0, 5.0), (8.0, 12.0)]


def test_new_measurements_move_an_old_cost_slowly():
    costs = StepCosts()
    costs.observe_pass(2, 1.0)
    costs.observe_pass(2, 2.0)
    assert costs.pass_seconds(2) == pytest.approx(1.1)
    for _ in range(100):
        costs.observe_pass(2, 2.0)
    assert costs.pass_seconds(2) == pytest.approx(2.0, rel=1e-3)


def test_drafting_costs_are_kept_by_method_and_guess():
    costs = StepCosts()
    assert costs.drafting_seconds("ngram", 5) == 0.0
    costs.observe_drafting("ngram", 4, 0.4)
    assert costs.drafting_seconds("ngram", 5) == pytest.approx(0.5)
    assert costs.drafting_seconds("suffix", 5) == 0.0


@pytest.mark.parametrize(
    ("wanted", "total", "shares"),
    [
        ([5, 5, 5], 15, [5, 5, 5]),
        ([5, 5, 5], 9, [3, 3, 3]),
        ([1, 10, 10], 9, [1, 4, 4]),
        ([0, 8], 3, [0, 3]),
        ([4, 4], -2, [0, 0]),
        ([], 3, []),
    ],
)
def test_scarce_rows_are_shared_evenly(wanted: list[int], total: int, shares: list[int]):
    assert fair_shares(wanted, total) == shares
