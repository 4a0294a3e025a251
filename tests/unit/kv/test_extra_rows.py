"""What a sequence has of a drafter's rows: spans, states, pages that others find."""

import pytest
import torch

from foreword.kv.extra_rows import KEPT_STATES, ExtraRows
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.kv.prefix_cache import PrefixNode
from foreword.kv.sequence import KvSequence

KIND = "head"
LAG = 1


def states(first: int, end: int, salt: int = 0) -> torch.Tensor:
    """One number for each position."""
    return torch.arange(first, end).float()[:, None] + 1000 * salt


def rows_with(first: int, end: int) -> ExtraRows:
    rows = ExtraRows(KIND)
    rows.add(first, states(first, end))
    return rows


def test_states_are_known_in_one_stretch_whatever_they_came_in():
    rows = rows_with(0, 5)
    rows.add(5, states(5, 6))
    rows.add(6, states(6, 9))
    assert (rows.states_begin, rows.states_end) == (0, 9)
    assert rows.states(3, 8).flatten().tolist() == [3, 4, 5, 6, 7]
    assert rows.states(5, 6).flatten().tolist() == [5]
    with pytest.raises(ValueError, match="states of positions 8"):
        rows.states(8, 10)


def test_states_that_come_again_replace_what_was_known():
    rows = rows_with(0, 8)
    rows.add(5, states(5, 7, salt=1))
    assert rows.states(3, 7).flatten().tolist() == [3, 4, 1005, 1006]
    assert rows.states_end == 7
    rows.add(0, states(0, 2, salt=2))
    assert rows.states(0, 2).flatten().tolist() == [2000, 2001]


def test_a_gap_ends_what_was_known_and_the_rows_before_it():
    rows = rows_with(0, 8)
    rows.end = LAG
    rows.fill(rows.missing_from(LAG), 9)
    assert (rows.begin, rows.end) == (0, 9)
    rows.add(20, states(20, 24))
    assert (rows.states_begin, rows.states_end, rows.missing_from(LAG)) == (20, 24, 21)
    rows.fill(21, 25)
    assert (rows.begin, rows.end) == (21, 25)


def test_of_a_long_stretch_the_newest_states_are_kept_without_the_others():
    whole = states(0, 500)
    rows = ExtraRows(KIND)
    rows.add(0, whole)
    rows.keep_newest()
    assert (rows.states_begin, rows.states_end) == (500 - KEPT_STATES, 500)
    kept = rows.states(500 - KEPT_STATES, 500)
    assert kept.untyped_storage().nbytes() < whole.untyped_storage().nbytes()
    for position in range(500, 600):
        rows.add(position, states(position, position + 1))
        rows.keep_newest()
    assert rows.states_end - rows.states_begin == KEPT_STATES
    assert rows.states(540, 600).flatten().tolist() == list(range(540, 600))


def computed(cache: PagedCache, tokens: list[int], tenant: str = "") -> KvSequence:
    """A sequence whose rows are all there, and published."""
    kv = cache.open(tenant, tokens)
    count = len(tokens) - kv.computed
    cache.reserve(kv, count)
    cache.commit(kv, count, ())
    cache.publish(kv, tokens)
    return kv


def filled(kv: KvSequence, tokens: list[int], first: int = 0) -> ExtraRows:
    """All rows of the kind, from position `first` on."""
    rows = kv.rows_of(KIND, LAG)
    rows.add(first, states(first, len(tokens)))
    rows.fill(rows.missing_from(LAG), len(tokens))
    rows.mark(kv.chain)
    return rows


TOKENS = [*range(100, 100 + 3 * PAGE_SIZE + 5)]


def test_a_published_page_tells_which_rows_it_has_and_its_last_states():
    cache = PagedCache(20, prefix_caching=True)
    filled(computed(cache, TOKENS), TOKENS)
    later = cache.open("", TOKENS)
    rows = later.rows_of(KIND, LAG)
    assert (rows.begin, rows.end) == (0, 3 * PAGE_SIZE)
    assert (rows.states_begin, rows.states_end) == (3 * PAGE_SIZE - 1, 3 * PAGE_SIZE)
    assert rows.states(3 * PAGE_SIZE - 1, 3 * PAGE_SIZE).flatten().tolist() == [3 * PAGE_SIZE - 1]
    assert rows.missing_from(LAG) == 3 * PAGE_SIZE
    assert cache.open("another", TOKENS).extra == {}


def test_pages_without_the_rows_are_found_without_them():
    cache = PagedCache(20, prefix_caching=True)
    computed(cache, TOKENS)
    assert cache.open("", TOKENS).extra == {}


def test_one_who_joined_late_marks_nothing():
    cache = PagedCache(20, prefix_caching=True)
    kv = computed(cache, TOKENS)
    rows = filled(kv, TOKENS, first=10)  # inside the first page
    assert rows.begin == 11
    assert all(not node.states for node in kv.chain)


def test_rows_that_are_filled_after_their_page_was_published_are_found():
    cache = PagedCache(20, prefix_caching=True)
    kv = computed(cache, TOKENS)
    rows = kv.rows_of(KIND, LAG)
    rows.add(0, states(0, len(TOKENS)))
    rows.fill(LAG, PAGE_SIZE + 3)
    rows.mark(kv.chain)
    assert cache.open("", TOKENS).extra[KIND].end == PAGE_SIZE
    rows.fill(PAGE_SIZE + 3, len(TOKENS))
    rows.mark(kv.chain)
    assert cache.open("", TOKENS).extra[KIND].end == 3 * PAGE_SIZE


def test_a_page_of_another_brings_its_rows_or_takes_ours_away():
    """Where the same text was published first by another, its page is used."""
    for theirs_is_filled in (True, False):
        cache = PagedCache(20, prefix_caching=True)
        mine = cache.open("", TOKENS)
        cache.reserve(mine, len(TOKENS))
        cache.commit(mine, len(TOKENS), ())
        rows = mine.rows_of(KIND, LAG)
        rows.add(0, states(0, len(TOKENS)))
        rows.fill(LAG, PAGE_SIZE + 4)
        theirs = computed(cache, TOKENS)
        if theirs_is_filled:
            filled(theirs, TOKENS)
        cache.publish(mine, TOKENS)
        assert mine.pages[:3] == theirs.pages[:3]
        assert (rows.begin, rows.end) == (0, 3 * PAGE_SIZE if theirs_is_filled else 0)
        assert mine.rows_of(KIND, LAG).missing_from(LAG) == (3 * PAGE_SIZE if theirs_is_filled else LAG)


def test_late_rows_join_a_past_that_is_found():
    cache = PagedCache(20, prefix_caching=True)
    filled(computed(cache, TOKENS), TOKENS)
    mine = cache.open("", TOKENS[:20])
    more = len(TOKENS) - mine.computed
    cache.reserve(mine, more)
    cache.commit(mine, more, ())
    mine.extra.clear()
    rows = mine.rows_of(KIND, LAG)
    rows.add(30, states(30, len(TOKENS)))
    rows.fill(31, len(TOKENS))
    cache.publish(mine, TOKENS)
    assert (rows.begin, rows.end) == (0, len(TOKENS))


def chain_of(*has_rows: bool) -> list[PrefixNode]:
    """Published pages, with rows of the kind or without."""
    nodes: list[PrefixNode] = []
    for place, has in enumerate(has_rows):
        tokens = tuple(range(place * PAGE_SIZE, (place + 1) * PAGE_SIZE))
        kept = {KIND: states(tokens[-1], tokens[-1] + 1)} if has else {}
        nodes.append(PrefixNode(nodes[-1] if nodes else "", tokens, place, kept))
    return nodes


def joined_late(begin: int, end: int) -> ExtraRows:
    rows = rows_with(begin - LAG, end)
    rows.fill(begin, end)
    assert (rows.begin, rows.end) == (begin, end)
    return rows


def test_rows_that_are_clipped_before_a_late_begin_start_anew():
    rows = joined_late(20, 30)
    rows.clip(25)
    assert (rows.begin, rows.end) == (20, 25)
    rows.clip(18)
    assert (rows.begin, rows.end) == (18, 18), "none is left"
    rows.fill(18, 22)
    assert (rows.begin, rows.end) == (18, 22), "what is filled then counts"


@pytest.mark.parametrize(
    ("begin", "pages", "expected"),
    [
        (PAGE_SIZE, (True,), (0, 40)),  # they meet the rows of the pages just so
        (PAGE_SIZE + 1, (True,), (PAGE_SIZE + 1, 40)),  # a row is missing between
        (20, (True, True), (0, 40)),
        (35, (True, True, True), (0, 3 * PAGE_SIZE)),  # the pages have more
        (20, (True, False), (0, PAGE_SIZE)),  # the second page took theirs away
        (20, (False, False), (PAGE_SIZE, PAGE_SIZE)),  # and nothing is before it
        (20, (False, True), (20, 40)),
    ],
)
def test_a_late_joiner_adopts_pages(begin: int, pages: tuple[bool, ...], expected: tuple[int, int]):
    rows = joined_late(begin, 40)
    rows.adopt(chain_of(*pages))
    assert (rows.begin, rows.end) == expected


def test_a_fork_has_the_rows_and_states_that_it_starts_with():
    cache = PagedCache(20, prefix_caching=True)
    kv = computed(cache, TOKENS)
    filled(kv, TOKENS)
    copy = cache.fork(kv, 30)
    rows = copy.rows_of(KIND, LAG)
    assert (rows.begin, rows.end, rows.states_end) == (0, 30, 30)
    rows.add(30, states(30, 33, salt=1))
    assert kv.rows_of(KIND, LAG).states(30, 31).flatten().tolist() == [30], "the first keeps its own"


def test_rows_behind_the_computed_end_are_gone_with_the_pass():
    cache = PagedCache(20)
    kv = cache.open()
    cache.reserve(kv, 20)
    cache.commit(kv, 10, ())
    rows = kv.rows_of(KIND, LAG)
    rows.add(0, states(0, 10))
    cache.reserve(kv, 4)
    rows.fill(LAG, 11)  # the newest token's row is made before the pass that computes it
    cache.rollback(kv)
    assert rows.end == 10
    assert rows.states(9, 10).flatten().tolist() == [9], "and can be made again"
    cache.close(kv)
    assert kv.extra == {}
