"""The cache's bookkeeping, run against a pretend memory that moves and writes rows as a pass would."""

import random
from contextlib import suppress

import pytest

from foreword.kv.block_pool import OutOfPages
from foreword.kv.paged_cache import PagedCache
from foreword.kv.sequence import KvSequence
from helpers.pretend_memory import PretendMemory

PAGE = 4


def reserve_and_run(memory: PretendMemory, sequence: KvSequence, values: list[object]) -> None:
    memory.cache.reserve(sequence, len(values))
    memory.run_pass({sequence: values})


def test_a_chain_commits_without_moving_anything():
    cache = PagedCache(8, PAGE)
    memory, sequence = PretendMemory(cache), cache.open()
    reserve_and_run(memory, sequence, ["a", "b", "c", "d", "e", "f", "g", "h", "i"])
    cache.commit(sequence, 2, [0, 1])
    assert sequence.computed == 4
    assert cache.take_moves() == []
    assert (
        len(sequence.pages) == 2
    )  # the page that only rejected rows needed is back, not that of the next row
    cache.check_integrity()


def test_a_path_is_moved_into_place_by_the_next_pass():
    cache = PagedCache(8, PAGE)
    memory, sequence = PretendMemory(cache), cache.open()
    reserve_and_run(memory, sequence, ["run", "n0", "n1", "n2", "n3", "n4"])
    cache.commit(sequence, 1, [1, 3, 4])
    reserve_and_run(memory, sequence, ["next"])
    slots = [cache.slot(sequence, row) for row in range(5)]
    assert [memory.rows[slot] for slot in slots] == ["run", "n1", "n3", "n4", "next"]


def test_rollback_restores_pages_and_lengths_and_can_be_repeated():
    cache = PagedCache(8, PAGE)
    sequence = cache.open()
    reserve_and_run(PretendMemory(cache), sequence, list("abcdef"))
    cache.commit(sequence, 6, [])
    before = (list(sequence.pages), sequence.computed, cache.pool.num_free)
    cache.reserve(sequence, 9)
    cache.rollback(sequence)
    cache.rollback(sequence)
    assert (list(sequence.pages), sequence.computed, cache.pool.num_free) == before
    cache.check_integrity()


def test_running_out_of_pages_changes_nothing():
    cache = PagedCache(2, PAGE)
    sequence = cache.open()
    cache.reserve(sequence, 4)
    cache.commit(sequence, 4, [])
    with pytest.raises(OutOfPages):
        cache.reserve(sequence, 5)
    assert sequence.reserved == sequence.computed == 4
    assert cache.pool.num_free == 1


def test_committing_more_than_was_reserved_is_refused():
    cache = PagedCache(2, PAGE)
    sequence = cache.open()
    cache.reserve(sequence, 2)
    with pytest.raises(ValueError, match="reserved"):
        cache.commit(sequence, 1, [1])


def test_a_fork_shares_full_pages_and_copies_the_tail():
    cache = PagedCache(8, PAGE)
    memory, sequence = PretendMemory(cache), cache.open()
    reserve_and_run(memory, sequence, list("abcdef"))
    cache.commit(sequence, 6, [])
    twin = cache.fork(sequence)
    assert twin.pages[0] == sequence.pages[0]
    assert twin.pages[1] != sequence.pages[1]
    cache.reserve(sequence, 1)
    cache.reserve(twin, 1)
    memory.run_pass({sequence: ["g"], twin: ["h"]})
    for each, last in ((sequence, "g"), (twin, "h")):
        cache.commit(each, 1, [])
        rows = [memory.rows[cache.slot(each, row)] for row in range(7)]
        assert rows == [*"abcdef", last]
    cache.close(sequence)
    cache.close(twin)
    assert cache.pool.num_free == 8


def test_a_fork_of_fewer_rows_leaves_the_others_behind():
    cache = PagedCache(8, PAGE)
    memory, sequence = PretendMemory(cache), cache.open()
    reserve_and_run(memory, sequence, list("abcdefghij"))
    cache.commit(sequence, 10, [])
    twin, whole = cache.fork(sequence, 6), cache.fork(sequence, 8)
    assert (twin.computed, twin.reserved, len(twin.pages)) == (6, 6, 2)
    assert whole.pages == sequence.pages[:2]
    assert memory.computed_rows(twin) == list("abcdef")
    cache.check_integrity()
    with pytest.raises(ValueError, match="computed"):
        cache.fork(sequence, 11)
    with pytest.raises(ValueError, match="computed"):
        cache.fork(sequence, -1)


def test_a_fork_of_a_path_takes_its_rows_from_where_they_lie():
    cache = PagedCache(8, PAGE)
    memory, sequence = PretendMemory(cache), cache.open()
    reserve_and_run(memory, sequence, ["run", "n0", "n1", "n2", "n3", "n4"])
    cache.commit(sequence, 1, [1, 3, 4])
    twin = cache.fork(sequence, 3)
    assert twin.pages[0] != sequence.pages[0]
    assert memory.computed_rows(twin) == ["run", "n1", "n3"]


def test_rewinding_drops_the_moves_of_the_rows_behind():
    cache = PagedCache(8, PAGE)
    memory, sequence = PretendMemory(cache), cache.open()
    reserve_and_run(memory, sequence, ["run", "n0", "n1", "n2", "n3", "n4"])
    cache.commit(sequence, 1, [1, 3, 4])
    cache.rewind(sequence, 2)
    assert [move.row for move in cache.pending_moves] == [1]
    cache.rewind(sequence, 1)
    assert cache.pending_moves == ()
    cache.check_integrity()


def test_a_sequence_is_open_until_it_is_closed():
    cache, other = PagedCache(8, PAGE), PagedCache(8, PAGE)
    sequence = cache.open()
    assert cache.is_open(sequence)
    assert not other.is_open(sequence)
    cache.close(sequence)
    assert not cache.is_open(sequence)


def test_without_prefix_caching_nothing_is_published():
    cache = PagedCache(8, PAGE)
    tokens = list(range(9))
    sequence = cache.open("tenant", tokens)
    cache.reserve(sequence, 8)
    cache.commit(sequence, 8, [])
    cache.publish(sequence, tokens)
    assert sequence.published == cache.matching_pages("tenant", tokens) == cache.prefix_queries == 0
    cache.close(sequence)
    assert cache.free_pages == cache.available_pages == 8


def test_writing_into_a_shared_page_is_caught():
    cache = PagedCache(8, PAGE)
    sequence = cache.open()
    cache.reserve(sequence, 3)
    cache.commit(sequence, 3, [])
    cache.pool.share(sequence.pages)
    with pytest.raises(AssertionError, match="shared"):
        cache.reserve(sequence, 1)


def test_closing_drops_the_moves_of_the_closed():
    cache = PagedCache(8, PAGE)
    memory, sequence = PretendMemory(cache), cache.open()
    reserve_and_run(memory, sequence, ["run", "n0", "n1"])
    cache.commit(sequence, 1, [1])
    cache.close(sequence)
    assert cache.take_moves() == []
    assert cache.pool.num_free == 8


class Traffic(PretendMemory):
    """Memory, and what each sequence's rows ought to be."""

    def __init__(self, cache: PagedCache) -> None:
        super().__init__(cache)
        self.expected: dict[KvSequence, list[object]] = {}


@pytest.mark.parametrize("seed", range(50))
def test_random_traffic_keeps_every_committed_row(seed: int):
    """Commits of random paths, rollbacks, failed passes, forks and closes on a small pool."""
    rng = random.Random(seed)
    cache = PagedCache(12, PAGE)
    memory = Traffic(cache)
    for step in range(200):
        if rng.random() < 0.25 and len(memory.expected) < 4:
            memory.expected[cache.open()] = []
        if not memory.expected:
            continue
        sequence = rng.choice(list(memory.expected))
        _random_action(rng, memory, sequence, step)
        _check_rows(memory)
    for sequence in list(memory.expected):
        cache.close(sequence)
    assert cache.pool.num_free == 12


def _random_action(rng: random.Random, memory: Traffic, sequence: KvSequence, step: int) -> None:
    cache, kind = memory.cache, rng.random()
    if kind < 0.08:
        cache.close(sequence)
        del memory.expected[sequence]
        return
    if kind < 0.16:
        with suppress(OutOfPages):
            memory.expected[cache.fork(sequence)] = memory.expected[sequence][: sequence.computed]
        return
    run, nodes = rng.randint(1, 3), rng.randint(0, 5)
    values: list[object] = [(step, i) for i in range(run + nodes)]
    try:
        cache.reserve(sequence, run + nodes)
    except OutOfPages:
        return
    failing = kind < 0.3
    memory.run_pass({sequence: values}, fail=failing)
    if failing:
        return
    path = sorted(rng.sample(range(nodes), rng.randint(0, nodes)))
    committed = values[:run] + [values[run + node] for node in path]
    memory.expected[sequence] = memory.expected[sequence][: sequence.computed] + committed
    cache.commit(sequence, run, path)


def _check_rows(memory: Traffic) -> None:
    memory.cache.check_integrity()
    for sequence, values in memory.expected.items():
        assert memory.computed_rows(sequence) == values[: sequence.computed]
