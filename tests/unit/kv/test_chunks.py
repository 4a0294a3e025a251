"""States and rings of recurrent layers: who holds them, when they are kept, and that none is lost or leaked."""

import random

import pytest

from foreword.kv.chunks import CHECKPOINT_EVERY, CHUNK, RING_ROWS, StateSizes
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.kv.sequence import KvSequence

TEXT = list(range(3000))


def new_cache(sequences: int = 4, checkpoints: int = 3, pages: int = 400) -> PagedCache:
    return PagedCache(pages, prefix_caching=True, states=StateSizes(sequences, checkpoints))


def compute(
    cache: PagedCache, sequence: KvSequence, rows: int, tokens: list[int] = TEXT, path: tuple[int, ...] = ()
) -> None:
    """One pass over committed rows and some nodes, all of it committed."""
    cache.begin_pass([sequence])
    cache.reserve(sequence, rows + (path[-1] + 1 if path else 0))
    cache.enter_chunk(sequence, sequence.computed + rows)
    moves = cache.take_moves()
    sequence.end_pass()
    cache.settle_moves(moves)
    cache.commit(sequence, rows, path)
    cache.publish(sequence, tokens)
    cache.check_integrity()


def test_a_state_is_written_once_per_chunk_and_the_one_before_it_is_released():
    cache = new_cache(checkpoints=0)
    sequence, seen = cache.open(), []
    for _ in range(3 * CHUNK):
        compute(cache, sequence, 1)
        assert len(sequence.chunks) == 1
        seen.append(sequence.chunks[0])
    assert [chunk.start for chunk in seen] == [row // CHUNK * CHUNK for row in range(3 * CHUNK)]
    assert cache.chunks is not None
    assert cache.chunks.states_used == 1


def test_a_failed_pass_loses_no_state():
    cache = new_cache()
    sequence = cache.open()
    compute(cache, sequence, 60)
    before = list(sequence.chunks)
    cache.begin_pass([sequence])
    cache.reserve(sequence, 10)
    cache.enter_chunk(sequence, 70)
    assert [chunk.start for chunk in sequence.chunks] == [0, CHUNK]
    cache.lose_pass(sequence, 60)
    assert sequence.chunks == before
    cache.check_integrity()


def test_a_fork_whose_ring_was_lost_computes_its_chunk_again_in_pages_of_its_own():
    cache = new_cache()
    first = cache.open()
    compute(cache, first, 100)
    copy = cache.fork(first, 99)
    assert copy.chunks[0].state == first.chunks[0].state
    assert len(cache.pending_moves) == 99 - CHUNK
    cache.lose_moves(cache.take_moves())
    assert copy.computed == CHUNK
    compute(cache, copy, 36)


def test_two_passes_in_flight_enter_two_chunks():
    cache = new_cache()
    sequence = cache.open()
    for first in (0, 100):
        cache.begin_pass([sequence])
        cache.reserve(sequence, 100)
        cache.enter_chunk(sequence, first + 100)
        sequence.declare_commit(100)
    assert [chunk.start for chunk in sequence.chunks] == [0, CHUNK, 3 * CHUNK]
    sequence.end_pass()
    cache.commit(sequence, 100, ())
    cache.publish(sequence, TEXT)
    assert [chunk.start for chunk in sequence.chunks] == [CHUNK, 3 * CHUNK]
    cache.lose_pass(sequence, 100)
    assert [chunk.start for chunk in sequence.chunks] == [CHUNK]
    cache.check_integrity()


def test_drafts_end_with_their_chunk_and_trees_fit_into_a_ring():
    cache = new_cache()
    assert [cache.max_draft_depth(last) for last in (0, 1, CHUNK - 2, CHUNK - 1, CHUNK)] == [63, 62, 1, 0, 63]
    sequence = cache.open()
    compute(cache, sequence, CHUNK - 1)
    slots = [
        cache.ring_slot(sequence, row) for row in (0, CHUNK - 1 + 64)
    ]  # 64 siblings at the chunk's last position
    assert [slot // RING_ROWS for slot in slots if slot is not None] == [sequence.chunks[0].ring] * 2


def test_prompts_keep_states_now_and_then_and_at_their_end():
    cache = new_cache(checkpoints=8)
    first = cache.open()
    prompt = TEXT[: 2 * CHECKPOINT_EVERY + 200]
    compute(cache, first, len(prompt), prompt)
    assert cache.chunks is not None
    assert cache.chunks.num_checkpoints == 3
    for length, found in (
        (len(prompt), (len(prompt) - 1) // CHUNK * CHUNK),
        (2 * CHECKPOINT_EVERY + 60, 2 * CHECKPOINT_EVERY),
        (CHECKPOINT_EVERY + 60, CHECKPOINT_EVERY),
        (CHECKPOINT_EVERY, 0),
    ):
        assert cache.matching_pages("", prompt[:length]) * PAGE_SIZE == found
    assert cache.matching_pages("other", prompt) == 0


def test_the_least_recently_used_state_is_dropped_first_and_a_closed_text_keeps_its_newest():
    cache = new_cache(checkpoints=2)
    assert cache.chunks is not None
    texts = [[1000 * number + token for token in range(200)] for number in range(3)]
    for text in texts[:2]:
        sequence = cache.open(tokens=text)
        compute(cache, sequence, 200, text)
        cache.close(sequence)
    cache.close(cache.open(tokens=texts[0]))  # used again
    sequence = cache.open(tokens=texts[2])
    compute(cache, sequence, 200, texts[2])
    assert [cache.matching_pages("", text) > 0 for text in texts] == [True, False, True]
    assert cache.chunks.counts.evicted == 1
    cache.clear_prefix_cache()
    assert cache.chunks.num_checkpoints == 0
    cache.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_leaks_nothing(seed: int):
    """Passes of any size, trees, forks, failures and closings; integrity is checked after each."""
    rng = random.Random(seed)
    cache = new_cache(sequences=6, checkpoints=rng.choice([0, 2, 5]), pages=600)
    texts = [[rng.randrange(3) for _ in range(3000)] for _ in range(2)]
    running: list[tuple[KvSequence, list[int]]] = []
    for _ in range(150):
        action = rng.random()
        if action < 0.15 and cache.can_open:
            text = rng.choice(texts)
            running.append((cache.open(tokens=text[: rng.randrange(2, 900)]), text))
        elif action < 0.25 and running:
            sequence, text = rng.choice(running)
            rows = sequence.computed - rng.randrange(3)
            if rows > 0 and cache.can_fork(sequence, rows):
                running.append((cache.fork(sequence, rows), text))
        elif action < 0.35 and running:
            cache.close(running.pop(rng.randrange(len(running)))[0])
        elif action < 0.45 and running:
            sequence, _ = rng.choice(running)
            cache.begin_pass([sequence])
            cache.reserve(sequence, 90)
            cache.enter_chunk(sequence, sequence.computed + 90)
            moves = cache.take_moves()
            cache.lose_pass(sequence, sequence.computed)
            cache.lose_moves(moves)
        elif running:
            sequence, text = rng.choice(running)
            run = rng.choice([1, 1, 7, 64, 200])
            depth = min(3, cache.max_draft_depth(sequence.computed + run - 1))
            path = tuple(sorted(rng.sample(range(12), rng.randrange(depth + 1))))
            compute(cache, sequence, run, text, path)
        cache.check_integrity()
    for sequence, _ in running:
        cache.close(sequence)
    cache.clear_prefix_cache()
    assert cache.chunks is not None
    assert cache.chunks.states_used == 0
    cache.check_integrity()
