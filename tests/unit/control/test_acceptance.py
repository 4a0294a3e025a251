"""What is believed of a drafter by what was counted."""

import pytest

from foreword.control.acceptance import HEAD_COVERAGE, MAX_ESTIMATES, PRIOR_RATE, Estimate, Estimates
from foreword.control.settings import ControlSettings

SETTINGS = ControlSettings()
HALF_LIFE = SETTINGS.half_life_seconds


def guess(pair: Estimate, is_right: bool) -> None:
    """One draft of one level, judged."""
    expected = pair.rates.expected[0]
    pair.requested(1, 1)
    pair.counts.count_level(0, 1, 0 if is_right else None)
    pair.finished(int(is_right), expected)
    pair.refresh(0.0)


def test_what_a_heads_maker_has_measured_weighs_as_much_as_few_drafts():
    """Also in a cohort that has seen nothing yet: what it begins with comes from all others."""
    estimates = Estimates()
    seen = estimates.of("head", "", "chat", HEAD_COVERAGE, published=(0.95, 0.95))
    assert seen.rates.accepted[0][0] == 0.95
    for number in range(60):
        guess(seen, is_right=number % 10 < 3)
    assert 0.3 < seen.rates.accepted[0][0] < 0.6
    new = estimates.of("head", "", "code", HEAD_COVERAGE, published=(0.95, 0.95))
    assert 0.6 < new.rates.accepted[0][0] < 0.8


def test_one_cohort_says_little_of_another_however_much_was_seen_of_it():
    """And many say much: a head that guessed badly for one kind of work is tried for the next one all the same."""
    estimates = Estimates()

    def bad_cohort(name: str, drafts: int) -> float:
        pair = estimates.of("head", name, "chat", HEAD_COVERAGE, published=(0.7,))
        for number in range(drafts):
            guess(pair, is_right=number % 10 < 2)
        return estimates.of("head", "new", "chat", HEAD_COVERAGE, published=(0.7,)).rates.accepted[0][0]

    assert bad_cohort("summaries", 400) > 0.42
    del estimates.known["head", "new", "chat"]
    for number in range(20):
        last = bad_cohort(f"tenant {number}", 40)
        del estimates.known["head", "new", "chat"]
    assert last < 0.27


def test_cohorts_that_do_not_come_back_weigh_less_and_less():
    """And one that does counts as before, once."""
    estimates = Estimates()
    published = (0.7,)
    for number in range(10):
        pair = estimates.of("head", f"tenant {number}", "chat", HEAD_COVERAGE, published)
        for draft in range(100):
            guess(pair, is_right=draft % 10 < 2)
    new = estimates.of("head", "new", "chat", HEAD_COVERAGE, published)
    assert new.rates.accepted[0][0] < 0.3
    pooled = estimates.drafters["head"]
    asks = pooled.counts.requests
    new.refresh(3 * HALF_LIFE)
    assert 0.3 * asks < pooled.counts.requests < 0.5 * asks
    new.refresh(10 * HALF_LIFE)
    assert 0 < pooled.counts.requests < asks / 50
    pair.refresh(10 * HALF_LIFE)
    for _ in range(100):
        guess(pair, is_right=False)
    pair.refresh(10 * HALF_LIFE)
    once = pooled.counts.requests
    assert asks / 12 < once < asks / 9
    pair.refresh(10 * HALF_LIFE)
    assert pooled.counts.requests == once
    again = Estimates()
    again.restore(estimates.as_json(20 * HALF_LIFE))
    assert again.pooled("head", HEAD_COVERAGE).counts.requests < 0.2
    for lives in range(20, 400):  # more than the unit of what is counted can grow
        new.refresh(lives * HALF_LIFE)
    later = estimates.of("head", "later", "chat", HEAD_COVERAGE, published)
    assert later.rates.accepted[0][0] == pytest.approx(0.7)


def test_counts_decay_for_longer_than_a_float_can_tell_from_for_ever():
    estimates = Estimates()
    other, pair = (estimates.of("head", name, "chat", HEAD_COVERAGE) for name in ("other", "tenant"))
    for _ in range(100):
        guess(pair, is_right=True)
    other.refresh(1e9)
    pair.refresh(1e9)
    assert max(pair.counts.requests, estimates.drafters["head"].counts.requests) < 1e-9
    guess(pair, is_right=True)
    pair.refresh(1e9)
    assert estimates.drafters["head"].counts.requests > 0.5


def test_a_cohort_that_is_forgotten_says_nothing_any_more():
    estimates = Estimates()
    old = estimates.of("head", "old", "chat", HEAD_COVERAGE)
    for _ in range(100):
        guess(old, is_right=False)
    for number in range(MAX_ESTIMATES):
        estimates.of("head", f"tenant {number}", "chat", HEAD_COVERAGE)
    guess(old, is_right=False)  # its requests are still there
    guess(estimates.of("head", "tenant 0", "chat", HEAD_COVERAGE), is_right=True)
    assert estimates.of("head", "new", "chat", HEAD_COVERAGE).rates.accepted[0][0] > PRIOR_RATE


def test_what_was_counted_before_a_change_weighs_as_much_as_few_drafts():
    pair = Estimates().of("lookup", "", "chat")
    for _ in range(1500):
        guess(pair, is_right=True)
    assert pair.counts.requests > 10 * SETTINGS.cohort_drafts
    while not pair.changes:
        guess(pair, is_right=False)
    assert pair.counts.requests <= SETTINGS.cohort_drafts + 1


def test_a_restored_cohort_counts_once_and_as_what_its_drafter_is():
    """Whether it is a head is known only when it is there."""
    before = Estimates()
    seen = before.of("head", "tenant", "chat", HEAD_COVERAGE)
    for _ in range(100):
        guess(seen, is_right=True)
    again = Estimates()
    again.restore(before.as_json())
    as_lookup = again.pooled("head").counts.requests
    asks = again.pooled("head", HEAD_COVERAGE).counts.requests
    assert asks > 2 * as_lookup
    again.of("head", "tenant", "chat", HEAD_COVERAGE)
    assert again.pooled("head", HEAD_COVERAGE).counts.requests == pytest.approx(asks)


def test_a_draft_request_without_a_draft_counts_in_the_pooled_estimate():
    estimates = Estimates()
    pair = estimates.of("lookup", "tenant", "chat")
    assert estimates.drafters["lookup"].counts.requests == 0
    for _ in range(30):
        pair.requested(4, 0)
    pair.refresh(0.0)
    assert estimates.drafters["lookup"].counts.requests > 4
