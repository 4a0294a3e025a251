"""What steps take by their rows."""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import NamedTuple

DRIFT_MEMORY = 0.1
"""Weight of the newest step in what all row counts share: another process, a clock, a longer context."""

SHAPE_MEMORY = 0.02
"""Weight of the newest step in what its own row count costs beside the others, once enough were seen."""

BACK = 8
BACK_MEMORY = 0.15
"""Weight of a step with a row count that was not seen for this many steps in what that one costs beside the others, and
of as many after it: all sizes would else be believed to be slower by turns, and none in particular."""

SETTLED = 50
USUAL = 1.05
LOOKED_AT = 4
"""After so many steps of a row count, of those that take as long as expected, within this factor, only every fourth is
looked at: looking takes time."""

BEYOND_NOISE, LONG_AGO = 1.03, 1000
"""Times as long as a longer pass that a pass is believed to take if both were seen so often, and not so many steps ago:
one row may be computed in another way than two."""

PAUSE = 1.25
"""Times as long as expected that a step takes if it was interrupted. One of these tells nothing, a second one does.

What one has made of all row counts would be taken back from the one that is seen next: by and by all those that are
seldom seen would seem to take longer than they do."""

UNSEEN = 64
"""Steps after which a row count that was not seen in them is taken to have changed as its neighbours have."""

FARTHEST = 4.0
"""A step counts as at most this many times as slow, or as fast, as was expected."""

ALONE = 8
"""Steps with the same row count in a row after which they tell nothing of what it costs beside the others."""

PROFILED = 8
"""Steps that a measurement at start-up counts as."""

BETWEEN = 4
"""Steps that what is known of both neighbours of a row count counts as: one slow step would else be believed of it, and
of all larger ones, for ever."""


@dataclass
class _Bucket:
    rows: float  # mean
    seconds: float  # mean, without the drift
    seen: int  # steps
    at: int = 0  # number of the last of them
    fresh: int = 0  # steps for which it still counts as having come back
    was_slow: bool = False  # the last of them


class _Block(NamedTuple):
    """Row counts that are believed to take the same time."""

    weight: float
    seconds: float
    rows: list[float]
    is_settled: bool  # whether what it takes beside others is beyond doubt

    def contradicts(self, longer: "_Block") -> bool:
        """Whether noise makes it look slower than one with more rows."""
        noise = BEYOND_NOISE if self.is_settled and longer.is_settled else math.inf
        return longer.seconds < self.seconds < noise * longer.seconds

    def together(self, longer: "_Block") -> "_Block":
        weight = self.weight + longer.weight
        seconds = (self.weight * self.seconds + longer.weight * longer.seconds) / weight
        return _Block(weight, seconds, self.rows + longer.rows, self.is_settled and longer.is_settled)


class StepCurve:
    """The measured time of steps by their rows.

    Row counts are put in buckets, eight to a doubling. Between known buckets the cost is
    interpolated; outside them it grows as `rows + PRIOR_ROWS`, which is how a small model on a CPU behaves. What makes
    one bucket slower soon makes all of them slower: most of them are rarely seen.
    """

    PRIOR_ROWS = 4

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._drift = 1.0
        self._seen = 0  # steps
        self._was_slow = False  # the last of them
        self._last: _Bucket | None = None  # its row count
        self._in_a_row = 0  # steps with the same one

    @property
    def is_known(self) -> bool:
        return bool(self._buckets)

    def observe(self, rows: int, seconds: float) -> float:
        """Learn from a step; by what factor all are believed to take longer now."""
        self._seen += 1
        known = self._buckets.get(_bucket(rows)) or self._between(rows)
        if known is None:
            self._buckets[_bucket(rows)] = _Bucket(float(rows), seconds / self._drift, 1, self._seen)
            return 1.0
        expected = self._drift * known.seconds
        is_usual = known.seen > SETTLED and seconds < USUAL * expected and expected < USUAL * seconds
        if is_usual and not known.fresh and self._seen % LOOKED_AT and self._seen - known.at <= BACK:
            known.at, self._was_slow, known.was_slow = self._seen, False, False
            return 1.0
        if self._is_pause(known, seconds / expected):
            known.at = self._seen
            return 1.0
        return self._learn(known, rows, min(max(seconds / expected, 1 / FARTHEST), FARTHEST))

    def _is_pause(self, known: _Bucket, off: float) -> bool:
        """Whether a step that took so many times as long as expected tells nothing: the first of them does not.

        A row count that is slow each time it comes back is no pause, however fast others are between.
        """
        was_slow, is_slow = self._was_slow or known.was_slow, off > PAUSE
        self._was_slow = known.was_slow = is_slow
        return is_slow and not was_slow and self._seen > ALONE

    def _learn(self, known: _Bucket, rows: int, off: float) -> float:
        """A step of this row count took so many times as long as expected; by what factor all do now."""
        self._in_a_row, self._last = self._in_a_row + 1 if known is self._last else 0, known
        # Other row counts have just told how the machine is: what is new about one that was long not seen is its own.
        known.fresh = BACK if self._seen - known.at > BACK else max(known.fresh - 1, 0)
        drift, shape = (SHAPE_MEMORY, BACK_MEMORY) if known.fresh else (DRIFT_MEMORY, SHAPE_MEMORY)
        # What was measured at another time is soon moved to where this machine is now.
        slower: float = off ** max(drift, 1 / self._seen)
        self._drift *= slower
        weight = max(shape if self._in_a_row < ALONE else 0.0, 1 / (known.seen + 1))
        known.rows += weight * (rows - known.rows)
        known.at, known.seen = self._seen, known.seen + 1
        # What interrupts a step has nothing to do with its rows.
        own = min(max(off / slower, 1 / PAUSE), PAUSE) ** weight
        known.seconds *= own
        self._take_along(known, own)
        if not 1 / FARTHEST < self._drift < FARTHEST:  # what was taken from one size after the other
            for bucket in self._buckets.values():
                bucket.seconds *= self._drift
            self._drift = 1.0
        return slower

    def _take_along(self, known: _Bucket, slower: float) -> None:
        """Believe of row counts that were not seen for long what is new about their neighbours that were."""
        lower: _Bucket | None = None  # the next smaller one that was
        between: list[_Bucket] = []
        for bucket in [*sorted(self._buckets.values(), key=lambda one: one.rows), None]:
            if bucket is not None and (not bucket.at or self._seen - bucket.at > UNSEEN):
                between.append(bucket)
                continue
            if known is lower or known is bucket:
                for one in between:
                    part = 1.0
                    if lower is not None and bucket is not None:
                        part = 1 - abs(one.rows - known.rows) / (bucket.rows - lower.rows)
                    one.seconds *= slower**part
            lower, between = bucket, []

    def _between(self, rows: int) -> _Bucket | None:
        """A new bucket that begins with what its neighbours say; None at either end."""
        points = self.points()
        if not points or not points[0][0] < rows < points[-1][0]:
            return None
        found = _Bucket(float(rows), self._at(points, rows) / self._drift, BETWEEN)
        self._buckets[_bucket(rows)] = found
        return found

    def begin_with(self, points: Iterable[tuple[float, float]]) -> None:
        """Take (rows, seconds) that were measured before, until steps tell better."""
        for rows, seconds in points:
            self._buckets.setdefault(_bucket(round(rows)), _Bucket(rows, seconds / self._drift, PROFILED))

    def seconds(self, rows: int) -> float | None:
        """Expected time of a step over this many rows; None before the first was measured."""
        return self._at(self.points(), rows) if self._buckets else None

    def table(self, most_rows: int) -> list[float] | None:
        """The same for 0 to `most_rows` rows, never falling: what noise says of a longer pass is not believed."""
        if not self._buckets:
            return None
        points, prior = self._rising(), self.PRIOR_ROWS
        first, seconds = points[0]
        found = _line(0, min(ceil(first), most_rows + 1), seconds / (first + prior), -prior, 0.0)
        for (low, shorter), (high, longer) in pairwise(points):
            end = min(ceil(high), most_rows + 1)
            found += _line(len(found), end, (longer - shorter) / (high - low), low, shorter)
        last, seconds = points[-1]
        return found + _line(len(found), most_rows + 1, seconds / (last + prior), -prior, 0.0)

    def points(self) -> list[tuple[float, float]]:
        """What was measured: (rows, seconds), by rows."""
        return sorted((known.rows, self._drift * known.seconds) for known in self._buckets.values())

    def _rising(self) -> list[tuple[float, float]]:
        """The points, where a shorter pass seems to take longer than the next one both as the two say together.

        Those that were seen often and of late weigh most: one that was measured at the start and never since must not
        make all larger ones look as slow.
        """
        blocks: list[_Block] = []
        for known in sorted(self._buckets.values(), key=lambda bucket: bucket.rows):
            age = self._seen - known.at
            weight, is_settled = min(known.seen, SETTLED) / (1 + age / SETTLED), known.seen >= SETTLED
            block = _Block(weight, self._drift * known.seconds, [known.rows], is_settled and age < LONG_AGO)
            while blocks and blocks[-1].contradicts(block):
                block = blocks.pop().together(block)
            blocks.append(block)
        return [(at, block.seconds) for block in blocks for at in block.rows]

    def _at(self, points: list[tuple[float, float]], rows: int) -> float:
        place = bisect_left(points, (rows, 0.0))
        if 0 < place < len(points):
            (low, shorter), (high, longer) = points[place - 1], points[place]
            return shorter + (longer - shorter) * (rows - low) / (high - low)
        return self._beyond(*points[min(place, len(points) - 1)], rows)

    def _beyond(self, nearest: float, seconds: float, rows: int) -> float:
        """Outside of what was measured."""
        return seconds * (rows + self.PRIOR_ROWS) / (nearest + self.PRIOR_ROWS)


def _line(begin: int, end: int, slope: float, low: float, at_low: float) -> list[float]:
    """The numbers of a straight line at every whole number of rows."""
    return [at_low + slope * (rows - low) for rows in range(begin, end)]


def _bucket(rows: int) -> int:
    """Eight buckets to a doubling."""
    scale = max(rows.bit_length() - 4, 0)
    return (rows >> scale) << scale
