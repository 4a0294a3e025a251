"""What is believed of a drafter by what was counted."""

from foreword.control.learning.estimates import HEAD_COVERAGE, KEPT_DRAFTS, Estimates, PairEstimate


def guess(pair: PairEstimate, is_right: bool) -> None:
    """One draft of one level, judged."""
    expected = pair.rates.expected[0]
    pair.answered(1, 1)
    pair.judged(0, 1, 0 if is_right else None)
    pair.finished(int(is_right), expected)
    pair.refresh(0.0)


def test_what_a_heads_maker_has_measured_weighs_as_much_as_few_drafts():
    """Also in a cohort that has seen nothing yet: what it begins with comes from all others."""
    estimates = Estimates()
    seen = estimates.pair("head", "", "chat", HEAD_COVERAGE, told=(0.95, 0.95))
    assert seen.rates.accepted[0][0] == 0.95
    for number in range(60):
        guess(seen, is_right=number % 10 < 3)
    new = estimates.pair("head", "", "code", HEAD_COVERAGE, told=(0.95, 0.95))
    assert 0.3 < new.rates.accepted[0][0] < 0.6


def test_what_was_counted_before_a_change_weighs_as_much_as_few_drafts():
    pair = Estimates().pair("lookup", "", "chat")
    for _ in range(1500):
        guess(pair, is_right=True)
    assert pair.counts.asks > 10 * KEPT_DRAFTS
    while not pair.changes:
        guess(pair, is_right=False)
    assert pair.counts.asks <= KEPT_DRAFTS + 1
