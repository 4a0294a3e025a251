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
"""With at most this many recent times, the largest one is used instead of the percentile, which would be too small."""

FARTHEST = 4.0
"""Upper limit of a measured time, as a multiple of the usual one: a single pause should not change the estimate."""

MIN_CAP_SECONDS = 1e-3
"""Minimum of this upper limit in seconds: if levels arrive together, a multiple of the usual time is nearly zero."""

PRIOR_RATE = 0.7  # prior acceptance rate of a level
PRIOR_WEIGHT = 4.0  # number of drafts for which the prior counts
IDLE = 0.5  # seconds without a token after which the engine counts as idle
_DECAY = 0.98  # factor of the acceptance counts per new draft
_NEWEST_WEIGHT = 0.1  # weight of the newest value in moving averages
_SAMPLES = 128  # number of recent first-level times
MOST_LEVELS = 32  # maximum levels with estimates


class NodeEstimates:
    """Estimates of a node's draft levels: when they arrive, and how often they are accepted."""

    def __init__(self) -> None:
        self.judged = 0  # drafts compared with the text
        self.first_seconds: float | None = None  # from sending a text until its first draft level arrives
        self.level_seconds: float | None = None  # from one level to the next
        self.late_after: float | None = None  # seconds after which a first level is late; None: unknown
        self._firsts: deque[float] = deque()  # recent first-level times
        self._sorted: list[float] = []  # the same times, in increasing order
        # By level, decaying counts of drafts whose level was compared with the text, and of those where it matched.
        self._compared = [0.0] * MOST_LEVELS
        self._matched = [0.0] * MOST_LEVELS
        self._coverage = [1.0] * MOST_LEVELS  # by level, recent fraction of drafts that have the level
        self._survival: list[float] = []  # last result of `survival`; empty: outdated

    def record_first(self, seconds: float) -> None:
        """Record the time from sending a text until its first draft level arrived."""
        self._firsts.append(seconds)
        insort(self._sorted, seconds)
        if len(self._firsts) > _SAMPLES:
            del self._sorted[bisect_left(self._sorted, self._firsts.popleft())]
        last = len(self._sorted) - 1
        percentile = max(int(0.99 * last), min(last, FEW_TIMES - 1))  # index of the 99th percentile
        self.late_after = LATE_FACTOR * self._sorted[percentile]
        self.first_seconds = _moving_average(self.first_seconds, _capped(seconds, self.first_seconds))

    def record_level(self, seconds: float) -> None:
        """Record the time from one draft level to the next."""
        self.level_seconds = _moving_average(self.level_seconds, _capped(seconds, self.level_seconds))

    def record_depth(self, levels: int, wanted: int) -> None:
        """Record that a complete draft has `levels` levels, of `wanted` requested ones."""
        self._survival = []
        for level in range(min(wanted, MOST_LEVELS)):
            is_covered = level < levels
            self._coverage[level] += _NEWEST_WEIGHT * (is_covered - self._coverage[level])

    def judge(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Compare a draft with the tokens that followed its text."""
        if not draft.tokens or not tokens:
            return
        self._survival = []
        matched, compared = _matching_levels(draft, tokens)
        for level in range(min(compared, MOST_LEVELS)):
            self._compared[level] = self._compared[level] * _DECAY + 1
            self._matched[level] = self._matched[level] * _DECAY + (level < matched)
        self.judged += 1

    @property
    def acceptance(self) -> float | None:
        """Recent acceptance rate of first levels; None: none was compared."""
        return self._matched[0] / self._compared[0] if self._compared[0] else None

    def survival(self, levels: int) -> list[float]:
        """Return, by level, the probability that a token arrives and is accepted, with all tokens before it."""
        levels = min(levels, MOST_LEVELS)
        if len(self._survival) < levels:
            chance, self._survival = 1.0, []
            for level in range(levels):
                matched, compared = self._matched[level], self._compared[level]
                chance *= (matched + PRIOR_RATE * PRIOR_WEIGHT) / (compared + PRIOR_WEIGHT)
                self._survival.append(chance * self._coverage[level])
        return self._survival[:levels]


def _capped(seconds: float, usual: float | None) -> float:
    """Return a measured time, at most a multiple of the usual one."""
    return seconds if usual is None else min(seconds, max(FARTHEST * usual, MIN_CAP_SECONDS))


def _matching_levels(draft: Draft, text: Sequence[int]) -> tuple[int, int]:
    """Return the number of a draft's levels that match the text, and the number that could be compared with it."""
    if draft.is_chain:
        matched = 0
        for drafted, token in zip(draft.tokens, text, strict=False):
            if drafted != token:
                break
            matched += 1
        return matched, min(matched + 1, len(draft.tokens), len(text))
    node = ROOT
    for level, token in enumerate(text):
        children = [child for child, parent in enumerate(draft.parents) if parent == node]
        matching = [child for child in children if draft.tokens[child] == token]
        if not matching:
            return level, level + 1 if children else level
        node = matching[0]
    return len(text), len(text)


class TokenRate:
    """Tokens per second of requests with remote drafts: the ratio of two decaying sums.

    A mean of rates would be distorted by several calls in one step, between which hardly any time passes.
    """

    def __init__(self) -> None:
        self._recorded_at: float | None = None  # time of the last token
        self._tokens = self._seconds = 0.0  # decaying sums

    @property
    def per_second(self) -> float | None:
        """Recent tokens per second; None: unknown."""
        return self._tokens / self._seconds if self._seconds else None

    def record(self, tokens: int, now: float) -> None:
        """Add the tokens committed since the last call."""
        if self._recorded_at is None or (not tokens and now - self._recorded_at > IDLE):
            self._recorded_at = now
        elif tokens and now > self._recorded_at:
            decay = 1 - _NEWEST_WEIGHT
            self._tokens = decay * self._tokens + tokens
            self._seconds = decay * self._seconds + now - self._recorded_at
            self._recorded_at = now


def _moving_average(mean: float | None, new: float) -> float:
    """Return the moving average after a new value; `mean` None: there was none before."""
    return new if mean is None else mean + _NEWEST_WEIGHT * (new - mean)


MOST_NEEDED = 64  # maximum number of timely answers before passes wait again for a node that is often late
AS_USUAL = 1.5  # multiple of the node's usual time within which an answer is timely after a late one


@dataclass
class CircuitBreaker:
    """Decides whether passes may wait for a node. While it is open, only drafts that have arrived are used."""

    is_open: bool = True  # open until the node has answered
    is_late: bool = False  # whether it opened because of a late answer
    reason: str = "not connected yet"  # why it is open; empty: it is closed
    trips: int = 0  # number of times that it opened
    _limit: float = field(default=inf, repr=False)  # seconds of the wait that failed; inf: no answer was late
    _trips_in_a_row: int = field(default=0, repr=False)
    _needed: int = field(default=1, repr=False)  # number of timely answers until it closes

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

        After a late answer, another one is timely if it takes at most as long as the wait that failed, or is close to
        `usual`. So no pass waits for a node that has become slower until `usual` has adapted.
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
        """Open the breaker. Each time in a row doubles the number of timely answers until it closes."""
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
    levels: list[tuple[float, float]] = []  # (seconds until arrival, expected tokens) of each level
    for arrival in arrivals:
        seconds = max(arrival.first_seconds, 0.0)
        if seconds > arrival.late_after:
            continue
        for chance in arrival.survival[arrival.at_hand : arrival.wanted]:
            levels.append((seconds, arrival.requests * chance))
            seconds += arrival.level_seconds  # later levels follow one by one
    levels.sort()
    best_gain, best_seconds, tokens = 0.0, 0.0, 0.0
    for seconds, level_tokens in levels:
        tokens += level_tokens
        gain = tokens - tokens_per_second * seconds
        if gain > best_gain:
            best_gain, best_seconds = gain, seconds
    return best_seconds


def longest_wait_seconds(arrivals: Sequence[ExpectedArrival], tokens_per_second: float) -> float:
    """Return the maximum seconds to wait: until all levels are late, or the wait has cost all that they could gain."""
    gain = sum(arrival.gain for arrival in arrivals)
    latest = max((arrival.latest for arrival in arrivals), default=0.0)
    return min(gain / tokens_per_second, latest) if tokens_per_second > 0 else latest
