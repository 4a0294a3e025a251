"""Pages before the window of all layers are given back, and nothing that is still read."""

import random

import pytest

from foreword.kv.paged_cache import PagedCache
from foreword.kv.sequence import FREED, REWIND_MARGIN, KvSequence

PAGE, WINDOW = 4, 10


def windowed(**options: bool) -> PagedCache:
    return PagedCache(400, PAGE, window=WINDOW, **options)


def grow(cache: PagedCache, sequence: KvSequence, rows: int, tokens: list[int] | None = None) -> None:
    cache.reserve(sequence, rows)
    cache.settle_moves(cache.take_moves())
    cache.commit(sequence, rows, [])
    if tokens is not None:
        cache.publish(sequence, tokens)
    cache.check_integrity()


def test_a_long_text_holds_a_window_and_what_may_be_rewound():
    cache = windowed()
    sequence = cache.open()
    for _ in range(300):
        grow(cache, sequence, 3)
        first_read = max(0, sequence.computed - REWIND_MARGIN - WINDOW)
        assert FREED not in sequence.pages[first_read // PAGE :]
    held = cache.pool.num_pages - cache.free_pages
    assert held <= (WINDOW + REWIND_MARGIN) // PAGE + 3
    cache.close(sequence)
    cache.check_integrity()
    assert cache.free_pages == cache.pool.num_pages


def test_what_is_published_stays_and_ends_with_the_first_window():
    cache = windowed(prefix_caching=True)
    tokens = list(range(600))
    sequence = cache.open("", tokens)
    for _ in range(60):
        grow(cache, sequence, 10, tokens)
    assert sequence.published == WINDOW // PAGE
    assert FREED not in sequence.pages[: sequence.published]
    assert sequence.pages[sequence.published] == FREED
    again = cache.open("", tokens)
    assert again.computed == WINDOW // PAGE * PAGE
    cache.close(sequence)
    cache.close(again)
    cache.check_integrity()


def test_a_fork_of_rows_whose_window_is_gone_is_refused():
    cache = windowed()
    sequence = cache.open()
    grow(cache, sequence, 400)
    assert not cache.can_fork(sequence, 100)
    assert cache.can_fork(sequence, 399)
    fork = cache.fork(sequence, 399)
    cache.settle_moves(cache.take_moves())
    cache.check_integrity()
    grow(cache, fork, 200)
    cache.close(sequence)
    cache.check_integrity()
    cache.close(fork)
    cache.check_integrity()


def test_moves_that_are_lost_find_their_window_again():
    cache, rng = windowed(), random.Random(1)
    sequence = cache.open()
    for _ in range(40):
        cache.reserve(sequence, 40)
        path = sorted(rng.sample(range(39), 8))
        moves = cache.take_moves()
        cache.commit(sequence, 1, path)
        cache.settle_moves(moves)
        if rng.random() < 0.3:
            cache.lose_moves(cache.take_moves())
        first = max(0, sequence.computed - WINDOW)
        assert FREED not in sequence.pages[first // PAGE :]
        cache.check_integrity()


@pytest.mark.parametrize("window", [None, 10**6])
def test_without_a_window_everything_stays(window: int | None):
    cache = PagedCache(100, PAGE, window=window)
    sequence = cache.open()
    grow(cache, sequence, 300)
    assert FREED not in sequence.pages
    assert cache.can_fork(sequence, 5)
