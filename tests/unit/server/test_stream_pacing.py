"""When an evenly paced stream releases what it has, on a clock that the tests move."""

import asyncio
import random
from itertools import pairwise

import pytest

from foreword.server.api.pacing import (
    BLOCK_BYTES,
    LAST_BLOCKS,
    EvenCadence,
    PaceMemory,
    Padder,
    replay,
)
from foreword.server.api.streaming import StreamPart, send_evenly

Burst = tuple[float, int]  # when it arrives, how many tokens


def play(bursts: list[Burst], memory: PaceMemory | None = None) -> list[Burst]:
    """(time, tokens) of every block of a stream with these arrivals."""
    blocks = replay([(now, [100] * count) for now, count in bursts], memory or PaceMemory())
    assert {block.size for block in blocks[:-1]} <= {BLOCK_BYTES}
    assert len(blocks) == 1 or blocks[-1].size == LAST_BLOCKS * BLOCK_BYTES
    return [(block.time, block.units) for block in blocks]


def gaps(sent: list[Burst]) -> list[float]:
    return [round(later[0] - earlier[0], 6) for earlier, later in pairwise(sent)]


def steady(sizes: list[int], step: float = 0.03) -> list[Burst]:
    return [(step * (number + 1), size) for number, size in enumerate(sizes)]


def test_the_first_burst_is_never_held_back():
    bursts = steady([3, 2, 1])
    assert play(bursts)[0] == bursts[0]
    assert play([(5.0, 1)]) == [(5.0, 1)]


def test_bursts_become_an_even_cadence():
    sent = play(steady([1, *[4, 1, 2, 5] * 20]))
    assert sum(count for _, count in sent) == 1 + 12 * 20
    after_start = gaps(sent)[10:]
    assert set(after_start) == {0.008}  # 10 ms a token; the nearest power of two
    alone = sum(count == 1 for _, count in sent)
    assert alone > 0.5 * len(sent)


def test_streams_of_equal_rate_look_alike_whatever_their_bursts():
    def blocks(sizes: list[int]) -> list[float]:
        return gaps(play(steady(sizes)))[20:120]

    assert blocks([1, *[1, 3] * 60]) == blocks([1, *[3, 1] * 60]) == blocks([1, *[2] * 120])


@pytest.mark.parametrize("seed", range(8))
def test_the_end_is_late_by_one_burst_at_most(seed):
    chance = random.Random(seed)
    count = chance.choice([2, 3, 10, 60])
    times, sizes, now = [], [], 0.0
    for _ in range(count):
        now += 0.02 + 0.01 * chance.random()
        times.append(now)
        sizes.append(chance.randint(1, chance.choice([1, 3, 9])))
    sent = play(list(zip(times, sizes, strict=True)))
    assert sum(n for _, n in sent) == sum(sizes)
    longest = max(later - earlier for earlier, later in pairwise(times))
    assert sent[-1][0] - times[-1] <= longest + 1e-9


def test_later_streams_begin_as_the_ones_before():
    memory = PaceMemory()
    play(steady([1, *[2] * 100]), memory)
    early = [gaps(play(steady([1, first, *[2] * 50]), memory))[:30] for first in (1, 2, 5)]
    assert early[0] == early[1] == early[2] == [0.016] * 30


def test_the_cadence_follows_a_rate_that_changes():
    slow = [(0.02 * n, 1) for n in range(100)]
    fast = [(2.0 + 0.1 * n, 1) for n in range(100)]
    after = gaps(play(slow + fast))
    assert after[50] == 0.016
    assert after[-2] in (0.064, 0.128)


def test_a_server_that_was_busy_does_not_catch_up():
    cadence = EvenCadence(PaceMemory())
    for number in range(50):
        cadence.arrived(0.01 * number, 1)
    assert cadence.take(10.0, 40) == 2
    assert cadence.due == pytest.approx(10.008)


def test_all_blocks_are_equally_long_and_readers_skip_the_padding():
    padder = Padder()
    for events in (b"", b"data: 1\n\n", b"data: " + b"x" * 500 + b"\n\n"):
        block = padder.padded(events)
        assert len(block) == BLOCK_BYTES
        assert block.endswith(events)
        assert [line for line in block.removesuffix(events).split(b"\n") if line.strip(b": ")] == []
    assert len(padder.padded(b"x" * BLOCK_BYTES)) == 2 * BLOCK_BYTES
    assert len(padder.padded(b"data: 1\n\n")) == 2 * BLOCK_BYTES  # for good: the next one tells nothing


@pytest.mark.parametrize("suspensions", [0, 1, 3])
def test_a_stream_of_two_parts_ends_however_late_its_source_does(suspensions: int):
    """The rate is unknown until the end: the last part does not count."""

    async def parts():
        yield StreamPart([b"first"])
        yield StreamPart([b"second"], is_end=True)
        for _ in range(suspensions):
            await asyncio.sleep(0)

    async def blocks() -> list[bytes]:
        return [block async for block in send_evenly(parts(), PaceMemory())]

    sent = b"".join(asyncio.run(asyncio.wait_for(blocks(), 20)))
    assert 0 < sent.index(b"first") < sent.index(b"second")
