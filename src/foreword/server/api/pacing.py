"""When a stream's tokens are released: at once, or at an even cadence in blocks of equal size.

Only the arithmetic is here; no clock runs and nothing is sent. Times are in seconds of any monotonic clock.
"""

from collections import deque
from collections.abc import Sequence
from math import ceil, log2
from typing import Final, NamedTuple

BLOCK_BYTES: Final = 1024
"""A block holds about three events of OpenAI's form. Longer ones make every later block longer too."""

LAST_BLOCKS: Final = 4
"""The last block is this long: it has whatever is left, and the costs, and does not tell how much that is."""

_SHORTEST_PERIOD = 0.001
_MEMORY = 1 - 1 / 32  # of the mean rate: what lies 32 bursts back counts a third
_STAY = 0.75  # a rate may leave the cadence by a factor of 2**0.75 before the cadence follows


_MOST_PER_TICK = 2  # units, before the end; they fit a block, and more arrive per tick only for a while
_REMEMBERED_BURSTS = 8  # how much the streams before weigh at the beginning of another


class PaceMemory:
    """What the streams before were like, so that the beginning of another does not tell its own rate.

    All streams of a server share it: it knows a mean rate and nothing else.
    """

    def __init__(self) -> None:
        self.period = 0.0  # 0: there was none yet
        self.seconds_per_burst = 0.0
        self.units_per_burst = 0.0


class EvenCadence:
    """A tick every period; a tick releases one waiting unit, two if more wait than one burst brings.

    The period is a power of two (of milliseconds) next to the mean time between tokens, so that it tells little
    about the rate and seldom changes. Ticks with nothing to release are ticks all the same.
    """

    def __init__(self, memory: PaceMemory) -> None:
        self.due: float | None = None  # the next tick; None: not before more has arrived
        self._memory = memory
        self._period = memory.period
        self._last_arrival: float | None = None
        # Fading sums over arrivals after the first.
        self._bursts = float(_REMEMBERED_BURSTS if memory.period else 0)
        self._seconds = self._bursts * memory.seconds_per_burst
        self._units = self._bursts * memory.units_per_burst
        self._ticks_per_burst = 1
        self._last_share: int | None = None  # units per tick once the end is known

    def arrived(self, now: float, units: int) -> None:
        """A burst of this many units has come. The first of a stream is not to be held back by anybody."""
        if self._last_arrival is not None:
            self._seconds = _MEMORY * self._seconds + (now - self._last_arrival)
            self._units = _MEMORY * self._units + units
            self._bursts = _MEMORY * self._bursts + 1
            self._follow(self._seconds / max(self._units, 1.0))
            if self.due is None:
                self.due = now
        elif self._period:
            self.due = now + self._period
        self._last_arrival = now

    def ended(self, now: float, waiting: int) -> None:
        """Nothing comes after what is waiting now: it is released within the time of one burst."""
        self._last_share = ceil(waiting / self._ticks_per_burst)
        if self.due is None:
            self.due = now
        if self._bursts:
            self._memory.period = self._period
            self._memory.seconds_per_burst = self._seconds / self._bursts
            self._memory.units_per_burst = self._units / self._bursts

    @property
    def has_ended(self) -> bool:
        """Whether nothing comes after what is waiting."""
        return self._last_share is not None

    def take(self, now: float, waiting: int) -> int:
        """A tick: how many of the waiting units go with it. What came too late for its tick is not caught up with."""
        assert self.due is not None
        self.due += self._period
        if self.due <= now:
            self.due = now + self._period
        if self._last_share is not None:
            return min(self._last_share, waiting)
        return min(ceil(waiting / self._ticks_per_burst), _MOST_PER_TICK, waiting)

    def _follow(self, mean: float) -> None:
        """Choose the period for a mean time between units."""
        mean = max(mean, _SHORTEST_PERIOD)
        if not self._period or abs(log2(mean / self._period)) > _STAY:
            self._period = float(_SHORTEST_PERIOD * 2 ** round(log2(mean / _SHORTEST_PERIOD)))
        self._ticks_per_burst = max(int(self._seconds / self._bursts / self._period), 1)


COMMENT = (b":", b"\n\n")
"""Around a comment in a stream of events."""


class Padder:
    """Makes all blocks of a stream equally long, with spaces that readers of the stream ignore."""

    def __init__(self, block_bytes: int = BLOCK_BYTES, around: tuple[bytes, bytes] = COMMENT) -> None:
        """`around` the spaces of a block is what makes readers ignore them."""
        self._step = block_bytes
        self._size = block_bytes
        self._before, self._after = around

    def padded(self, events: bytes, is_last: bool = False) -> bytes:
        """The events, which may be none, in a block. One that is too small for them is made larger for good."""
        shortest = len(self._before) + len(self._after) + len(events)
        least = LAST_BLOCKS * self._step if is_last else self._size
        self._size = max(least, self._step * ceil(shortest / self._step))
        return self._before + b" " * (self._size - shortest) + self._after + events


class Block(NamedTuple):
    """What a watcher of the wire sees, and how many units it holds, which the watcher does not see."""

    time: float
    units: int
    size: int  # bytes


def replay(bursts: Sequence[tuple[float, Sequence[int]]], memory: PaceMemory) -> list[Block]:
    """The blocks of a stream whose bursts came at these times, with units of this many bytes, on a perfect clock."""
    cadence, padder = EvenCadence(memory), Padder()
    waiting: deque[int] = deque()
    coming = deque(bursts)

    def send(now: float, count: int) -> Block:
        events = b"x" * sum(waiting.popleft() for _ in range(count))
        is_last = cadence.has_ended and not waiting
        return Block(now, count, len(padder.padded(events, is_last)))

    blocks: list[Block] = []
    while coming or waiting:
        if coming and (cadence.due is None or coming[0][0] <= cadence.due):
            now, units = coming.popleft()
            waiting.extend(units)
            cadence.arrived(now, len(units))
            if not blocks:
                blocks.append(send(now, len(units)))
            if not coming:
                cadence.ended(now, len(waiting))
        elif cadence.due is not None:
            now = cadence.due
            blocks.append(send(now, cadence.take(now, len(waiting))))
    return blocks
