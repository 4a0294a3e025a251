"""Even pacing of a stream: computes at which times its tokens are sent, in blocks of equal size.

A unit is the event of one token; a burst is all units of one target pass. Times are seconds of any monotonic clock; the
callers read the clock and send the blocks.
"""

from collections import deque
from collections.abc import Sequence
from math import ceil, log2
from typing import Final, NamedTuple

BLOCK_BYTES: Final = 1024
"""Initial block size in bytes, about three OpenAI events. If events do not fit, all later blocks are larger, too."""

LAST_BLOCKS: Final = 4
"""Size of the last block, in blocks of the initial size, to hide how many tokens were left."""

_SHORTEST_PERIOD = 0.001  # minimum seconds between ticks
_DECAY = (
    1 - 1 / 32
)  # decay per burst of the mean rate: a burst 32 bursts ago has a third of the newest one's weight
_STAY = 0.75  # the rate may deviate by a factor of 2**0.75 before the period changes
_MOST_PER_TICK = 2  # maximum units per tick before the end of the stream; two fit into a block
_REMEMBERED_BURSTS = 8  # number of bursts for which earlier streams count at the start of a new one


class PaceMemory:
    """Mean rate of earlier streams, so that the start of a stream does not reveal its own rate.

    Shared by all streams of a server.
    """

    def __init__(self) -> None:
        self.period = 0.0  # seconds between ticks; 0: no stream has ended yet
        self.seconds_per_burst = 0.0
        self.units_per_burst = 0.0


class EvenCadence:
    """Releases one waiting unit per tick, or two if more than one burst waits.

    The period is a power of two in milliseconds near the mean time between tokens, so that it reveals little about the
    rate and rarely changes. A tick without units sends a block of padding.
    """

    def __init__(self, memory: PaceMemory) -> None:
        self.due: float | None = None  # time of the next tick; None: wait for more units
        self._memory = memory
        self._period = memory.period
        self._last_arrival: float | None = None
        # Decayed sums over the bursts after the first one.
        self._bursts = float(_REMEMBERED_BURSTS if memory.period else 0)
        self._seconds = self._bursts * memory.seconds_per_burst
        self._units = self._bursts * memory.units_per_burst
        self._ticks_per_burst = 1
        # Units per tick after the end of the stream; None: not ended
        self._units_per_last_tick: int | None = None

    def arrived(self, now: float, units: int) -> None:
        """Add a burst of units. The first burst of a stream is not delayed."""
        if self._last_arrival is not None:
            self._seconds = _DECAY * self._seconds + (now - self._last_arrival)
            self._units = _DECAY * self._units + units
            self._bursts = _DECAY * self._bursts + 1
            self._adapt_period(self._seconds / max(self._units, 1.0))
            if self.due is None:
                self.due = now
        elif self._period:
            self.due = now + self._period
        self._last_arrival = now

    def ended(self, now: float, waiting: int) -> None:
        """End the stream: waiting units are released within the time of one burst."""
        self._units_per_last_tick = ceil(waiting / self._ticks_per_burst)
        if self.due is None:
            self.due = now
        if self._bursts:
            self._memory.period = self._period
            self._memory.seconds_per_burst = self._seconds / self._bursts
            self._memory.units_per_burst = self._units / self._bursts

    @property
    def has_ended(self) -> bool:
        """Whether no more units will arrive."""
        return self._units_per_last_tick is not None

    def take(self, now: float, waiting: int) -> int:
        """Return how many waiting units this tick releases, and set the time of the next tick.

        Missed ticks are skipped.
        """
        assert self.due is not None
        self.due += self._period
        if self.due <= now:
            self.due = now + self._period
        if self._units_per_last_tick is not None:
            return min(self._units_per_last_tick, waiting)
        return min(ceil(waiting / self._ticks_per_burst), _MOST_PER_TICK, waiting)

    def _adapt_period(self, mean_seconds: float) -> None:
        """Adapt the period to a mean time between units."""
        mean_seconds = max(mean_seconds, _SHORTEST_PERIOD)
        if not self._period or abs(log2(mean_seconds / self._period)) > _STAY:
            self._period = float(_SHORTEST_PERIOD * 2 ** round(log2(mean_seconds / _SHORTEST_PERIOD)))
        self._ticks_per_burst = max(int(self._seconds / self._bursts / self._period), 1)


COMMENT = (b":", b"\n\n")
"""Start and end of a comment in an event stream."""


class Padder:
    """Pads the blocks of a stream to equal size with spaces that clients ignore."""

    def __init__(self, block_bytes: int = BLOCK_BYTES, around: tuple[bytes, bytes] = COMMENT) -> None:
        """`around`: the bytes before and after the spaces."""
        self._step = block_bytes  # block sizes are multiples of this
        self._size = block_bytes  # current block size
        self._before, self._after = around

    def padded(self, events: bytes, is_last: bool = False) -> bytes:
        """Return the events, if any, as a block. If they do not fit, this and all later blocks are larger."""
        shortest = len(self._before) + len(self._after) + len(events)
        least = LAST_BLOCKS * self._step if is_last else self._size
        self._size = max(least, self._step * ceil(shortest / self._step))
        return self._before + b" " * (self._size - shortest) + self._after + events


class Block(NamedTuple):
    """A block that was sent; an observer of the connection sees its time and size."""

    time: float
    units: int  # number of units in the block
    size: int  # bytes


def replay(bursts: Sequence[tuple[float, Sequence[int]]], memory: PaceMemory) -> list[Block]:
    """Return the blocks of a simulated stream; a burst is (time, sizes of its units in bytes)."""
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
