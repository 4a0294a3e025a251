"""Several passes at once: for a sequence one, or two where the first is foreseen; nothing counts before it is done."""

import pytest

from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.kv.sequence import KvSequence


def computed(cache: PagedCache, rows: int, tenant: str = "", publish: bool = True) -> KvSequence:
    """A sequence whose token i is i."""
    sequence = cache.open(tenant)
    cache.reserve(sequence, rows)
    cache.commit(sequence, rows, ())
    if publish:
        cache.publish(sequence, list(range(rows)))
    return sequence


def with_moves(cache: PagedCache) -> KvSequence:
    """A sequence whose row 15, the last of its first page, waits for its move."""
    sequence = computed(cache, 14, publish=False)
    cache.reserve(sequence, 6)
    cache.commit(sequence, 1, (2, 3))
    assert [move.row for move in cache.pending_moves] == [15, 16]
    return sequence


def test_a_second_pass_for_the_same_sequence_is_refused():
    cache = PagedCache(4)
    one, other = cache.open(), cache.open()
    cache.begin_pass([one])
    with pytest.raises(AssertionError, match="depends on a pass in flight"):
        cache.begin_pass([other, one])
    assert not other.passes
    cache.begin_pass([other])
    one.end_pass()
    other.end_pass()
    cache.begin_pass([one])
    with pytest.raises(AssertionError, match="twice"):
        cache.begin_pass([other, other])


def begun(cache: PagedCache, sequence: KvSequence, rows: int) -> int:
    """A foreseen pass over the next rows; returns the row at which it begins."""
    first = sequence.begin
    cache.begin_pass([sequence])
    cache.reserve(sequence, rows)
    sequence.declare_commit(rows)
    cache.check_integrity()
    return first


def test_a_foreseen_pass_can_be_followed_by_one_more():
    cache = PagedCache(4)
    sequence = computed(cache, 15)
    assert [begun(cache, sequence, 1), begun(cache, sequence, 1)] == [15, 16]
    assert (sequence.computed, sequence.reserved, len(sequence.pages)) == (15, 17, 2)
    with pytest.raises(AssertionError, match="depends on a pass in flight"):
        cache.begin_pass([sequence])
    for end in (16, 17):
        sequence.end_pass()
        cache.commit(sequence, 1, ())
        cache.check_integrity()
        assert (sequence.computed, sequence.reserved, len(sequence.pages)) == (end, 17, 2)
    assert not cache.is_busy(sequence)


def test_the_first_of_two_passes_takes_the_second_with_it():
    cache = PagedCache(4)
    sequence = computed(cache, 15)
    first, _ = begun(cache, sequence, 1), begun(cache, sequence, 1)
    cache.lose_pass(sequence, first)
    cache.check_integrity()
    assert (sequence.begin, sequence.reserved, len(sequence.pages), sequence.losses) == (15, 15, 1, 1)
    assert not cache.is_busy(sequence)


def test_the_second_of_two_passes_leaves_the_first_alone():
    cache = PagedCache(4)
    sequence = computed(cache, 15)
    begun(cache, sequence, 1)
    cache.lose_pass(sequence, begun(cache, sequence, 1))
    cache.check_integrity()
    assert (sequence.begin, sequence.reserved, len(sequence.pages), sequence.losses) == (16, 16, 1, 0)
    assert begun(cache, sequence, 1) == 16


def test_a_pass_with_guesses_is_followed_by_none():
    cache = PagedCache(4)
    sequence = computed(cache, 5)
    cache.begin_pass([sequence])
    cache.reserve(sequence, 4)
    assert cache.is_busy(sequence)


def test_a_sequence_that_is_closed_gives_back_the_rows_of_passes_under_way():
    cache = PagedCache(4)
    sequence = computed(cache, 15)
    begun(cache, sequence, 1)
    begun(cache, sequence, 1)
    cache.close(sequence)
    cache.check_integrity()
    assert cache.free_pages == 4


def test_moves_under_way_are_not_done_yet():
    """Neither published nor forked, and the next pass for their owner has to wait for them."""
    cache = PagedCache(8, prefix_caching=True)
    sequence = with_moves(cache)
    moves = cache.take_moves()
    cache.check_integrity()
    assert cache.take_moves() == []
    cache.publish(sequence, list(range(17)))
    assert sequence.published == 0
    assert cache.can_fork(sequence, 15)
    assert not cache.can_fork(sequence, 16)
    with pytest.raises(AssertionError, match="can_fork` is false"):
        cache.fork(sequence)
    assert cache.is_busy(sequence)
    with pytest.raises(AssertionError, match="depends on a pass in flight"):
        cache.begin_pass([sequence])
    cache.settle_moves(moves)
    assert not cache.is_busy(sequence)
    cache.publish(sequence, list(range(17)))
    assert sequence.published == 1
    cache.check_integrity()


def test_moves_that_are_lost_take_their_rows_with_them():
    cache = PagedCache(8, prefix_caching=True)
    sequence = with_moves(cache)
    cache.lose_moves(cache.take_moves())
    assert sequence.computed == 15
    assert not cache.is_busy(sequence)
    cache.check_integrity()


def test_moves_of_a_sequence_that_was_closed_meanwhile_concern_nobody():
    cache = PagedCache(8)
    sequence = with_moves(cache)
    moves = cache.take_moves()
    cache.close(sequence)
    cache.lose_moves(moves)
    cache.settle_moves(moves)
    cache.check_integrity()
    assert cache.free_pages == 8


def test_pages_that_are_not_trusted_are_found_by_nobody():
    """Everything that builds on the first page goes; other texts and other tenants keep theirs."""
    cache = PagedCache(20, prefix_caching=True)
    bad = computed(cache, 3 * PAGE_SIZE)
    other_tenant = computed(cache, 2 * PAGE_SIZE, tenant="other")
    text = list(range(3 * PAGE_SIZE))
    sibling = cache.open("", [*text[:PAGE_SIZE], *range(500, 520)])
    cache.reserve(sibling, PAGE_SIZE)
    cache.commit(sibling, PAGE_SIZE, ())
    cache.publish(sibling, [*text[:PAGE_SIZE], *range(500, 500 + PAGE_SIZE)])
    assert sibling.published == 2
    cache.unpublish_suspect(bad)
    cache.check_integrity()
    assert cache.matching_pages("", [*text, 0]) == 0
    assert cache.matching_pages("", [*text[:PAGE_SIZE], *range(500, 520)]) == 0
    assert cache.matching_pages("other", [*text, 0]) == 2
    for sequence in (bad, sibling, other_tenant):
        cache.close(sequence)
        cache.check_integrity()
    assert cache.available_pages == 20


def test_what_a_distrusted_sequence_computes_later_is_not_published():
    cache = PagedCache(20, prefix_caching=True)
    bad = computed(cache, PAGE_SIZE)
    cache.unpublish_suspect(bad)
    cache.reserve(bad, PAGE_SIZE)
    cache.commit(bad, PAGE_SIZE, ())
    cache.publish(bad, list(range(2 * PAGE_SIZE)))
    assert cache.matching_pages("", list(range(40))) == 0


def test_whoever_uses_distrusted_pages_publishes_nothing_more():
    """What it computes on top of them may hold no numbers either."""
    cache = PagedCache(20, prefix_caching=True)
    bad = computed(cache, PAGE_SIZE)
    text = list(range(2 * PAGE_SIZE))
    user = cache.open("", [*text, 0])
    assert user.computed == PAGE_SIZE
    cache.unpublish_suspect(bad)
    cache.reserve(user, PAGE_SIZE)
    cache.commit(user, PAGE_SIZE, ())
    cache.publish(user, text)
    assert cache.matching_pages("", [*text, 0]) == 0
    cache.check_integrity()


def test_a_text_that_is_computed_again_is_no_new_query():
    cache = PagedCache(8, prefix_caching=True)
    computed(cache, PAGE_SIZE)
    queries = cache.prefix_queries
    cache.open("", list(range(20)), again=True)
    assert (cache.prefix_queries, cache.prefix_hits) == (queries, 0)
    cache.open("", list(range(20)))
    assert (cache.prefix_queries, cache.prefix_hits) == (queries + 20, PAGE_SIZE)
