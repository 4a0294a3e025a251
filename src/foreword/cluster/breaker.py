"""Whether a node is waited for: not after it was late once, until it shows that it is not."""

from dataclasses import dataclass, field
from math import inf

MOST_NEEDED = 64
"""Answers in time that a node which keeps being late has to give before it is waited for again."""

AS_USUAL = 1.5
"""An answer after at most so many times the usual time is in time, also of a node that has become slower."""


@dataclass
class Breaker:
    """Closed: the node may be waited for. Open: what it says is used if it is there, and nobody waits."""

    is_open: bool = True  # nothing was heard of it yet
    is_late: bool = False  # and that is why it is open
    reason: str = "not connected yet"
    trips: int = 0
    _limit: float = field(default=inf, repr=False)  # seconds that it was waited for in vain
    _row: int = field(default=0, repr=False)  # trips without a calm time between them
    _needed: int = field(default=1, repr=False)  # answers in time until it closes

    def late(self, waited: float) -> None:
        """It was waited for in vain."""
        self._trip(f"no answer after {waited * 1e3:.1f} ms")
        self.is_late, self._limit = True, waited

    def lost(self, reason: str) -> None:
        """The connection is gone: that it was late before does not count for the next one."""
        self._trip(reason)
        self._row, self.is_late, self._limit = 0, False, inf

    def believes(self, seconds: float, usual: float) -> bool:
        """Whether an answer after so long speaks for it; `usual` is what is expected of it by now.

        One that has become slower is not waited for again, as long as it was, before that is what is expected.
        """
        return seconds <= max(self._limit, AS_USUAL * usual)

    def in_time(self) -> None:
        """It has answered as it is expected to."""
        if self.is_open:
            self._needed -= 1
            if self._needed <= 0:
                self.is_open, self.is_late, self.reason, self._limit = False, False, "", inf
        elif self._row:
            self._row -= 1

    def _trip(self, reason: str) -> None:
        if not self.is_open:
            self.trips += 1
            self._row += 1
        self.is_open, self.reason = True, reason
        self._needed = min(2 ** max(self._row - 1, 0), MOST_NEEDED)
