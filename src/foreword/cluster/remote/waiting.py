"""How long a pass waits for levels that are on their way: while one more is worth what the others lose by it."""

from collections.abc import Sequence
from typing import NamedTuple

UNKNOWN_SECONDS = 1e-3
"""What a level is expected to take before one was measured."""


class Prospect(NamedTuple):
    """Levels that are on their way for some requests of one node which all have as many."""

    requests: int
    at_hand: int  # levels
    wanted: int
    survival: Sequence[float]  # by level, the chance that it is accepted
    first_seconds: float  # until the next level comes
    level_seconds: float  # from one to the next
    late_after: float  # seconds from now after which the next level is late: nobody waits longer for it

    @property
    def gain(self) -> float:
        """Tokens that all of it would bring."""
        return self.requests * sum(self.survival[self.at_hand : self.wanted])

    @property
    def latest(self) -> float:
        """Seconds from now until the last level that is wanted is late."""
        return self.late_after + max(self.wanted - self.at_hand - 1, 0) * self.level_seconds


def worth_waiting(prospects: Sequence[Prospect], tokens_per_second: float) -> float:
    """Seconds until the moment that is worth most: tokens that come by then, less those that the wait costs."""
    coming: list[tuple[float, float]] = []
    for one in prospects:
        when = max(one.first_seconds, 0.0)
        if when > one.late_after:
            continue
        for chance in one.survival[one.at_hand : one.wanted]:
            coming.append((when, one.requests * chance))
            when += one.level_seconds  # levels behind the next one take their time
    coming.sort()
    best, best_when, gained = 0.0, 0.0, 0.0
    for when, tokens in coming:
        gained += tokens
        if gained - tokens_per_second * when > best:
            best, best_when = gained - tokens_per_second * when, when
    return best_when


def most_worth(prospects: Sequence[Prospect], tokens_per_second: float) -> float:
    """Seconds beyond which a wait has cost more than all that could come would bring."""
    gain = sum(one.gain for one in prospects)
    late = max((one.latest for one in prospects), default=0.0)
    return min(gain / tokens_per_second, late) if tokens_per_second > 0 else late
