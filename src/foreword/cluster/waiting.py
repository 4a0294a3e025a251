"""Measurements of a node, its circuit breaker, and how long a pass waits for it."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from foreword.speculation.draft import ROOT, Draft

LATE_FACTOR = 3.0  # a node is late after this multiple of the 99th percentile of its recent times

FEW_TIMES = 8
"""Up to this many recent times, the largest counts instead of the percentile, which of two would be the smaller."""

FARTHEST = 4.0
"""Cap of a measured time, as a multiple of the usual one: a single pause should not move the estimate."""

MIN_CAP_SECONDS = 1e-3
"""Minimum of the cap in seconds: when levels arrive together, a multiple of the usual time is nearly zero."""

PRIOR_RATE = 0.7  # prior acceptance of a level
PRIOR_WEIGHT = 4.0  # number of drafts for which the prior counts
IDLE = 0.5  # seconds without a token after which the engine counts as idle
_KEPT = 0.98  # decay of the acceptance counts per new draft
_MEMORY = 0.1  # weight of the newest value in moving averages
_SAMPLES = 128  # number of recent first-level times
MOST_LEVELS = 32  # maximum levels with estimates


class NodeEstimates:
    """Estimates when a node's draft levels arrive and how often they are accepted."""

    def __init__(self) -> None:
        self.judged = 0  # drafts compared with the text
        self.first_seconds: float | None = None  # from sending a text until its first draft level arrives
        self.level_seconds: float | None = None  # from one level to the next
        self.late_after: float | None = None  # seconds after which a first level is late; None: unknown
        self._firsts: deque[float] = deque()  # recent first-level times
        self._sorted: list[float] = []  # the same times, in increasing order
        # Decaying counts of drafts by level: those whose level was compared with the text, and those where it matched.
        self._tried = [0.0] * MOST_LEVELS
        self._right = [0.0] * MOST_LEVELS
        self._coverage = [1.0] * MOST_LEVELS  # recent fraction of drafts that have the level
        self._survival: list[float] = []  # cache of `survival`

    def record_first(self, seconds: float) -> None:
        """Record the time from sending a text until its first draft level arrived."""
        self._firsts.append(seconds)
        insort(self._sorted, seconds)
        if len(self._firsts) > _SAMPLES:
            del self._sorted[bisect_left(self._sorted, self._firsts.popleft())]
        last = len(self._sorted) - 1
        self.late_after = LATE_FACTOR * self._sorted[max(int(0.99 * last), min(last, FEW_TIMES - 1))]
        self.first_seconds = _moving_average(self.first_seconds, _capped(seconds, self.first_seconds))

    def record_level(self, seconds: float) -> None:
        """Record the time from one draft level to the next."""
        self.level_seconds = _moving_average(self.level_seconds, _capped(seconds, self.level_seconds))

    def record_depth(self, levels: int, wanted: int) -> None:
        """Record that a complete draft has `levels` levels of the `wanted` ones."""
        self._survival = []
        for level in range(min(wanted, MOST_LEVELS)):
            self._coverage[level] += _MEMORY * ((level < levels) - self._coverage[level])

    def judge(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Compare a draft with the tokens that followed its text."""
        if not draft.tokens or not tokens:
            return
        self._survival = []
        right, tried = _matching_levels(draft, tokens)
        for level in range(min(tried, MOST_LEVELS)):
            self._tried[level] = self._tried[level] * _KEPT + 1
            self._right[level] = self._right[level] * _KEPT + (level < right)
        self.judged += 1

    @property
    def acceptance(self) -> float | None:
        """Recent acceptance rate of first levels; None: none was compared."""
        return self._right[0] / self._tried[0] if self._tried[0] else None

    def survival(self, levels: int) -> list[float]:
        """Return, by level, the probability that its draft token arrives and is accepted with all before it."""
        levels = min(levels, MOST_LEVELS)
        if len(self._survival) < levels:
            chance, self._survival = 1.0, []
            for level in range(levels):
                right, tried = self._right[level], self._tried[level]
                chance *= (right + PRIOR_RATE * PRIOR_WEIGHT) / (tried + PRIOR_WEIGHT)
                self._survival.append(chance * self._coverage[level])
        return self._survival[:levels]


def _capped(seconds: float, usual: float | None) -> float:
    """Return a measured time, limited by a multiple of the usual one."""
    return seconds if usual is None else min(seconds, max(FARTHEST * usual, MIN_CAP_SECONDS))


def _matching_levels(draft: Draft, text: Sequence[int]) -> tuple[int, int]:
    """Return the levels of a draft that match the text, and the levels that could be compared."""
    if draft.is_chain:
        right = 0
        for drafted, token in zip(draft.tokens, text, strict=False):
            if drafted != token:
                break
            right += 1
        return right, min(right + 1, len(draft.tokens), len(text))
    node = ROOT
    for level, token in enumerate(text):
        children = [n for n, parent in enumerate(draft.parents) if parent == node]
        child = next((n for n in children if draft.tokens[n] == token), None)
        if child is None:
            return level, level + bool(children)
        node = child
    return len(text), len(text)


class TokenRate:
    """Tokens per second of requests with remote drafts: the ratio of two decaying sums.

    A mean of rates would count the calls of one step, which follow each other at once.
    """

    def __init__(self) -> None:
        self._at: float | None = None
        self._tokens = self._seconds = 0.0  # recently

    @property
    def per_second(self) -> float | None:
        """Recent tokens per second; None: unknown."""
        return self._tokens / self._seconds if self._seconds else None

    def record(self, tokens: int, now: float) -> None:
        """Add the tokens committed since the last call."""
        if self._at is None or (not tokens and now - self._at > IDLE):
            self._at = now
        elif tokens and now > self._at:
            decay = 1 - _MEMORY
            self._tokens = decay * self._tokens + tokens
            self._seconds = decay * self._seconds + now - self._at
            self._at = now


def _moving_average(mean: float | None, new: float) -> float:
    return new if mean is None else mean + _MEMORY * (new - mean)


MOST_NEEDED = 64  # most timely answers that an often late node must give before passes wait for it
AS_USUAL = 1.5  # multiple of the node's usual time within which an answer is timely after a late one


@dataclass
class CircuitBreaker:
    """Decides whether passes may wait for a node. While it is open, only drafts that have arrived are used."""

    is_open: bool = True  # open until the node has answered
    is_late: bool = False  # whether it opened because of a late answer
    reason: str = "not connected yet"  # why it is open; empty: it is closed
    trips: int = 0  # number of times that it opened
    _limit: float = field(default=inf, repr=False)  # seconds waited for a late answer; inf: none was late
    _trips_in_a_row: int = field(default=0, repr=False)
    _needed: int = field(default=1, repr=False)  # timely answers until it closes

    def record_late(self, waited: float) -> None:
        """Open after a wait of `waited` seconds without an answer."""
        self._trip(f"no answer after {waited * 1e3:.1f} ms")
        self.is_late, self._limit = True, waited

    def record_loss(self, reason: str) -> None:
        """Open because the connection was lost, and forget earlier late answers."""
        self._trip(reason)
        self._trips_in_a_row, self.is_late, self._limit = 0, False, inf

    def is_timely(self, seconds: float, usual: float) -> bool:
        """Return whether an answer after `seconds` is in time; `usual` is the expected time.

        After a late answer, one is timely within the wait that failed, or close to `usual`. So no pass waits for a node
        that has become slower until `usual` has adapted.
        """
        return seconds <= max(self._limit, AS_USUAL * usual)

    def record_timely(self) -> None:
        """Count a timely answer; close after enough of them."""
        if self.is_open:
            self._needed -= 1
            if self._needed <= 0:
                self.is_open, self.is_late, self.reason, self._limit = False, False, "", inf
        elif self._trips_in_a_row:
            self._trips_in_a_row -= 1

    def _trip(self, reason: str) -> None:
        """Open. Each time in a row doubles the number of timely answers until it closes."""
        if not self.is_open:
            self.trips += 1
            self._trips_in_a_row += 1
        self.is_open, self.reason = True, reason
        self._needed = min(2 ** max(self._trips_in_a_row - 1, 0), MOST_NEEDED)


UNKNOWN_SECONDS = 1e-3  # expected seconds of a level before one was measured


class ExpectedArrival(NamedTuple):
    """Draft levels in flight from one node, for requests with the same number of available levels."""

    requests: int
    at_hand: int  # levels that have arrived
    wanted: int  # levels that were requested
    survival: Sequence[float]  # by level, probability that its token arrives and is accepted
    first_seconds: float  # until the next level
    level_seconds: float  # between later levels
    late_after: float  # seconds until the next level is late: no pass waits longer

    @property
    def gain(self) -> float:
        """Expected tokens if all wanted levels arrive."""
        return self.requests * sum(self.survival[self.at_hand : self.wanted])

    @property
    def latest(self) -> float:
        """Seconds until the last wanted level is late."""
        return self.late_after + max(self.wanted - self.at_hand - 1, 0) * self.level_seconds


def best_wait_seconds(arrivals: Sequence[ExpectedArrival], tokens_per_second: float) -> float:
    """Return the wait in seconds that maximizes expected tokens minus the tokens that the wait costs."""
    coming: list[tuple[float, float]] = []  # (seconds until arrival, expected tokens) of each level
    for one in arrivals:
        when = max(one.first_seconds, 0.0)
        if when > one.late_after:
            continue
        for chance in one.survival[one.at_hand : one.wanted]:
            coming.append((when, one.requests * chance))
            when += one.level_seconds  # later levels follow one by one
    coming.sort()
    best, best_when, gained = 0.0, 0.0, 0.0
    for when, tokens in coming:
        gained += tokens
        if gained - tokens_per_second * when > best:
            best, best_when = gained - tokens_per_second * when, when
    return best_when


def longest_wait_seconds(arrivals: Sequence[ExpectedArrival], tokens_per_second: float) -> float:
    """Return the maximum seconds to wait: then all wanted levels are late, or have cost more than they could gain."""
    gain = sum(one.gain for one in arrivals)
    late = max((one.latest for one in arrivals), default=0.0)
    return min(gain / tokens_per_second, late) if tokens_per_second > 0 else late
