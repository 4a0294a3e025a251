"""Which published pages make room for others, and when."""

import pytest

from foreword.kv.block_pool import OutOfPages
from helpers.prefix_requests import PAGE, answered, caching, compute


def test_idle_pages_are_available_and_evicted_only_when_free_ones_do_not_suffice():
    cache = caching(6)
    tokens = list(range(13))
    answered(cache, tokens)
    assert (cache.free_pages, cache.available_pages) == (3, 6)
    other = cache.open()
    cache.reserve(other, 3 * PAGE)
    assert cache.matching_pages("", tokens) == 3
    cache.reserve(other, 4 * PAGE)
    assert (cache.free_pages, cache.available_pages) == (0, 2)
    assert cache.matching_pages("", tokens) == 2  # the last page went first
    cache.check_integrity()


def test_too_large_a_demand_evicts_nothing():
    cache = caching(6)
    tokens = list(range(13))
    answered(cache, tokens)
    other = cache.open()
    with pytest.raises(OutOfPages):
        cache.reserve(other, 7 * PAGE)
    assert (cache.free_pages, cache.available_pages, other.pages) == (3, 6, [])
    assert cache.matching_pages("", tokens) == 3
    cache.reserve(other, 6 * PAGE)
    assert cache.available_pages == cache.matching_pages("", tokens) == 0
    cache.check_integrity()


def test_the_least_recently_used_text_is_evicted_first():
    cache = caching(9)
    old, middle, new = ([start + i for i in range(9)] for start in (100, 200, 300))
    for tokens in (old, middle, new):
        answered(cache, tokens)
    cache.matching_pages("", middle)  # looking is no use
    cache.close(cache.open("", old))
    taker = cache.open()
    cache.reserve(taker, 5 * PAGE)
    assert [cache.matching_pages("", tokens) for tokens in (old, middle, new)] == [2, 0, 2]
    cache.reserve(taker, 6 * PAGE)
    assert [cache.matching_pages("", tokens) for tokens in (old, middle, new)] == [2, 0, 1]
    cache.check_integrity()


def test_children_are_evicted_before_the_parent_they_share():
    cache = caching(8)
    stem = [0, 1, 2, 3]
    for branch in (50, 60):
        answered(cache, [*stem, *[branch] * 5])
    taker = cache.open()
    for rows, left in ((6, [1, 2]), (7, [1, 1]), (8, [0, 0])):
        cache.reserve(taker, rows * PAGE)
        assert [cache.matching_pages("", [*stem, *[branch] * 5]) for branch in (50, 60)] == left
        cache.check_integrity()


def test_pages_in_use_are_never_evicted():
    cache = caching(4)
    tokens = list(range(9))
    answered(cache, tokens)
    user = cache.open("", tokens)
    taker = cache.open()
    assert cache.available_pages == 2
    with pytest.raises(OutOfPages):
        cache.reserve(taker, 3 * PAGE)
    cache.reserve(taker, 2 * PAGE)
    assert not set(taker.pages) & set(user.pages)
    cache.check_integrity()


def test_a_fork_evicts_what_it_needs():
    cache = caching(4)
    answered(cache, [7, 7, 7, 7, 7])
    tokens = list(range(11))
    sequence = cache.open("", tokens)
    compute(cache, sequence, tokens)
    assert cache.free_pages == 0
    assert cache.fork(sequence).pages[:2] == sequence.pages[:2]
    with pytest.raises(OutOfPages):
        cache.fork(sequence)
    cache.check_integrity()
