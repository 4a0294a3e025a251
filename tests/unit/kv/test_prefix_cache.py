"""Pages that requests of one tenant share: what may be published and who may find it."""

import pytest

from foreword.kv.paged_cache import PagedCache
from foreword.kv.sequence import KvSequence
from helpers.prefix_requests import PAGE, answered, caching, compute
from helpers.pretend_memory import PretendMemory


def test_a_later_request_starts_with_the_full_pages_of_an_earlier_one():
    cache = caching()
    tokens = list(range(11))
    pages = answered(cache, tokens)
    sequence = cache.open("", [*tokens[:8], 77, 78])
    assert sequence.pages == pages[:2]
    assert (sequence.computed, sequence.reserved, sequence.published) == (8, 8, 2)
    cache.check_integrity()


@pytest.mark.parametrize("length", range(1, 14))
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_a_hit_covers_at_most_the_prompt_but_its_last_token(length: int, page_size: int):
    cache = caching(page_size=page_size)
    answered(cache, list(range(15)))
    tokens = list(range(length))
    assert cache.matching_pages("", tokens) == (length - 1) // page_size
    assert cache.open("", tokens).computed == (length - 1) // page_size * page_size < length


@pytest.mark.parametrize("length", range(1, 14))
def test_the_newest_token_has_no_kv_and_is_not_published(length: int):
    cache = caching()
    tokens = list(range(length))
    sequence = cache.open("", tokens)
    compute(cache, sequence, tokens)
    assert sequence.published == (length - 1) // PAGE
    assert cache.matching_pages("", [*tokens, 0, 0, 0, 0]) == (length - 1) // PAGE


def test_only_the_same_text_from_its_start_on_is_found():
    cache = caching()
    tokens = list(range(13))
    answered(cache, tokens)
    for place in range(12):
        changed = [*tokens[:place], 99, *tokens[place + 1 :]]
        assert cache.matching_pages("", changed) == place // PAGE
    assert cache.matching_pages("", tokens[4:]) == 0  # the second page's tokens at the first place


def test_tenants_never_share():
    cache = caching()
    tokens = list(range(9))
    mine = answered(cache, tokens, "mine")
    for other in ("", "Mine", "mine "):
        assert cache.matching_pages(other, tokens) == 0
    theirs = cache.open("theirs", tokens)
    compute(cache, theirs, tokens)
    assert theirs.computed == 8
    assert not set(theirs.pages) & set(mine)
    assert cache.open("mine", tokens).pages == mine[:2]
    assert cache.open("theirs", tokens).pages == theirs.pages[:2]


def test_drafted_rows_are_not_published_before_they_are_committed():
    """Bug 10: draft tokens counted when caching prefix blocks."""
    cache = caching()
    tokens = [0, 1, 2]
    sequence = cache.open("", tokens)
    cache.reserve(sequence, 9)
    cache.publish(sequence, [*tokens, 50, 51, 52, 53, 54, 55])
    assert sequence.published == 0
    cache.commit(sequence, 3, [0])  # of six guesses one was right
    cache.publish(sequence, [*tokens, 50, 60])
    assert sequence.published == 1
    assert cache.matching_pages("", [0, 1, 2, 50, 51, 52, 53, 54, 55]) == 1
    cache.check_integrity()


def test_rows_of_a_block_that_was_cut_are_not_published():
    cache = caching()
    sequence = cache.open("", [0])
    cache.reserve(sequence, 8)
    cache.commit(sequence, 8, [])
    cache.publish(sequence, [0, 1, 2, 3, 4])  # a stop text ended the answer inside the block
    assert sequence.published == 1
    cache.check_integrity()


def test_a_page_that_waits_for_a_move_is_published_after_it():
    cache = caching()
    memory, tokens = PretendMemory(cache), [0, 1, 2, 3, 4, 5]
    sequence = cache.open("", tokens)
    cache.reserve(sequence, 6 + 4)
    memory.run_pass({sequence: ["r0", "r1", "r2", "r3", "r4", "r5", "n0", "n1", "n2", "n3"]})
    cache.commit(sequence, 6, [1, 3])
    tokens += [61, 63, 7]
    cache.publish(sequence, tokens)
    assert (sequence.computed, sequence.published) == (8, 1)  # rows 6 and 7 lie elsewhere
    cache.reserve(sequence, 1)
    memory.run_pass({sequence: ["r8"]})
    cache.commit(sequence, 1, [])
    cache.publish(sequence, tokens)
    assert sequence.published == 2
    later = cache.open("", tokens)
    assert memory.computed_rows(later) == ["r0", "r1", "r2", "r3", "r4", "r5", "n1", "n3"]
    cache.check_integrity()


def test_a_lost_move_takes_back_nothing_that_is_published():
    cache = caching()
    memory, tokens = PretendMemory(cache), [0, 1, 2]
    sequence = cache.open("", tokens)
    cache.reserve(sequence, 3 + 7)
    memory.run_pass({sequence: list(range(10))})
    cache.commit(sequence, 3, [0, 1, 2, 4, 5])  # rows 6 and 7 wait
    tokens += [3, 4, 5, 7, 8, 9]
    cache.publish(sequence, tokens)
    assert sequence.published == 1
    cache.reserve(sequence, 1)
    memory.run_pass({sequence: ["lost"]}, fail=True)
    cache.publish(sequence, tokens)
    assert (sequence.computed, sequence.published) == (6, 1)
    cache.check_integrity()


def test_published_rows_cannot_be_rewound():
    cache = caching()
    tokens = list(range(10))
    sequence = cache.open("", tokens)
    compute(cache, sequence, tokens)
    cache.rewind(sequence, 8)
    with pytest.raises(AssertionError, match="published"):
        cache.rewind(sequence, 7)
    assert sequence.computed == 8
    cache.check_integrity()


def test_a_second_copy_of_a_published_text_gives_way_to_the_first():
    """Two requests computed the same prompt side by side; both answers can be found afterwards."""
    cache = caching()
    prompt = list(range(9))
    first, second = cache.open("", prompt), cache.open("", prompt)
    for sequence in (first, second):
        compute(cache, sequence, prompt)
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2:] == second.pages[2:] == []
    assert cache.free_pages == 14
    compute(cache, first, [*prompt, 10, 11, 12, 13])
    compute(cache, second, [*prompt, 20, 21, 22, 23])
    cache.close(first)
    cache.close(second)
    for middle in (10, 20):
        assert cache.matching_pages("", [*prompt, middle, middle + 1, middle + 2, middle + 3]) == 3
    cache.check_integrity()


def test_a_fork_publishes_its_own_continuation():
    cache = caching()
    tokens = list(range(11))
    sequence = cache.open("", tokens)
    compute(cache, sequence, tokens)
    twin, short = cache.fork(sequence, 10), cache.fork(sequence, 5)
    assert (twin.published, short.published) == (2, 1)
    cache.check_integrity()
    compute(cache, twin, [*tokens, 90, 91])
    compute(cache, sequence, [*tokens, 80, 81])
    for last in (80, 90):
        assert cache.matching_pages("", [*tokens, last, last + 1]) == 3
    for each in (sequence, twin, short):
        cache.close(each)
        cache.check_integrity()
    assert cache.available_pages == 16


def test_pages_forked_before_they_were_published_are_published_by_whoever_stays():
    cache = caching()
    tokens = list(range(9))
    sequence = cache.open("", tokens)
    cache.reserve(sequence, 8)
    cache.commit(sequence, 8, [])
    twin = cache.fork(sequence)
    cache.publish(sequence, tokens)
    assert sequence.published == 0
    cache.close(sequence)
    cache.publish(twin, tokens)
    assert twin.published == cache.matching_pages("", tokens) == 2
    cache.check_integrity()


def test_publishing_again_looks_at_no_token_again():
    class Counted(list[int]):
        looked = 0

        def __getitem__(self, key):
            Counted.looked += 1
            return super().__getitem__(key)

    cache = caching()
    tokens = Counted(range(40))
    sequence = cache.open("", tokens)
    compute(cache, sequence, tokens)
    Counted.looked = 0
    cache.publish(sequence, tokens)
    assert Counted.looked == 0


def test_looking_holds_and_counts_nothing():
    cache = caching()
    tokens = list(range(13))
    answered(cache, tokens)
    user = cache.open("", tokens[:5])
    before = (cache.available_pages, cache.prefix_queries, cache.prefix_hits)
    assert (cache.matching_pages("", tokens), cache.idle_matching_pages("", tokens)) == (3, 2)
    assert (cache.available_pages, cache.prefix_queries, cache.prefix_hits) == before
    cache.open("", tokens)
    assert cache.available_pages == before[0] - 2
    assert cache.idle_matching_pages("", tokens) == 0
    cache.close(user)
    assert cache.available_pages == before[0] - 2


def test_queries_and_hits_are_counted_in_tokens():
    cache = caching()
    tokens = list(range(13))
    answered(cache, tokens)
    assert (cache.prefix_queries, cache.prefix_hits) == (13, 0)
    cache.open("", tokens[:7])
    assert (cache.prefix_queries, cache.prefix_hits) == (20, 4)


def test_after_clearing_nobody_finds_anything_old():
    cache = caching()
    tokens, idle = list(range(9)), list(range(50, 63))
    answered(cache, idle)
    sequence = cache.open("", tokens)
    compute(cache, sequence, tokens)
    twin = cache.fork(sequence)
    cache.clear_prefix_cache()
    cache.check_integrity()
    assert cache.free_pages == cache.available_pages == 16 - len(sequence.pages)
    longer = [*tokens, *range(20, 26)]
    for each in (sequence, twin):  # both go on, but their rows are from before
        compute(cache, each, longer)
        assert cache.matching_pages("", longer) == cache.matching_pages("", idle) == 0
        cache.close(each)
    assert cache.free_pages == 16
    answered(cache, tokens)
    assert cache.matching_pages("", tokens) == 2


def test_rows_behind_a_hit_go_where_the_table_says():
    """Bug 39: contiguous slots assumed with a prefix cache."""
    cache = caching(8)
    tokens = list(range(9))
    sequence, between = cache.open("", tokens), cache.open()
    for rows in (PAGE, 2 * PAGE):
        cache.reserve(sequence, rows - sequence.computed)
        cache.commit(sequence, rows - sequence.computed, [])
        cache.reserve(between, rows)  # takes the page behind
    cache.publish(sequence, tokens)
    cache.close(sequence)
    hit = cache.open("", tokens)
    cache.reserve(hit, 3)
    pages = hit.pages
    assert pages[1] != pages[0] + 1
    assert pages[2] != pages[1] + 1
    slots = [cache.slot(hit, row) for row in range(11)]
    assert slots == [pages[row // PAGE] * PAGE + row % PAGE for row in range(11)]


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
def test_no_page_is_lost_whatever_the_lengths(page_size: int):
    """Bug 33: page leak with page size > 1."""
    cache = caching(40, page_size)
    for length in range(1, 2 * page_size + 3):
        for drafted in range(4):
            tokens = [length] * length
            sequence = cache.open("", tokens)
            run = length - sequence.computed
            cache.reserve(sequence, run + drafted)
            cache.commit(sequence, run, range(drafted // 2))
            cache.publish(sequence, [*tokens, *[9] * (drafted // 2 + 1)])
            cache.close(sequence)
            cache.check_integrity()
            assert cache.available_pages == 40
    cache.clear_prefix_cache()
    assert cache.free_pages == 40


def test_the_integrity_check_sees_what_is_wrong():
    def broken() -> tuple[PagedCache, KvSequence]:
        cache = caching()
        tokens = list(range(14))
        answered(cache, tokens)
        return cache, cache.open("", tokens[:9])

    cache, sequence = broken()
    sequence.chain.pop()
    with pytest.raises(AssertionError, match="outside the chain"):
        cache.check_integrity()
    cache, sequence = broken()
    sequence.computed = 7
    with pytest.raises(AssertionError, match="with a pending move"):
        cache.check_integrity()
    cache, sequence = broken()
    sequence.tenant = "other"
    with pytest.raises(AssertionError, match="differ"):
        cache.check_integrity()
    cache, sequence = broken()
    cache._prefix._idle.clear()
    with pytest.raises(AssertionError, match="idle list"):
        cache.check_integrity()
    cache, sequence = broken()
    cache.close(sequence)
    cache._prefix._idle.move_to_end(next(iter(cache._prefix._idle)))
    with pytest.raises(AssertionError, match="before its child"):
        cache.check_integrity()
    cache, sequence = broken()
    cache.pool.release([sequence.pages[0]])
    with pytest.raises(AssertionError, match="holder counts"):
        cache.check_integrity()
