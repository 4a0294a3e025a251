"""Step time by rows in the pass: a piecewise linear, monotone curve with exponential forgetting."""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foreword.speculation.measured.settings import COSTS


@dataclass
class _Size:
    """Statistics of passes in one size bucket."""

    rows: float  # mean rows
    seconds: float  # mean seconds, divided by the pace
    seen: int  # number of passes
    at: int = 0  # index of the last pass
    returning: int = 0  # remaining passes that count as its return
    was_slow: bool = False  # whether the last pass was slow


class _Block(NamedTuple):
    """Neighbouring sizes that share one expected time."""

    weight: float
    seconds: float
    rows: list[float]
    is_settled: bool

    def contradicts(self, longer: "_Block") -> bool:
        """Return whether it is slower than the longer block by no more than noise."""
        noise = COSTS.noise if self.is_settled and longer.is_settled else math.inf
        return longer.seconds < self.seconds < noise * longer.seconds

    def merged(self, longer: "_Block") -> "_Block":
        weight = self.weight + longer.weight
        seconds = (self.weight * self.seconds + longer.weight * longer.seconds) / weight
        return _Block(weight, seconds, self.rows + longer.rows, self.is_settled and longer.is_settled)


class CostCurve:
    """Expected seconds = pace × the size's own seconds.

    The pace follows every pass, so that a busy core slows all sizes at once. A size's own seconds change slowly,
    relative to other sizes. There are eight size buckets per doubling; the curve is linear between them and
    proportional to rows + `prior_rows` outside.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._pace = 1.0
        self._seen = 0  # passes
        self._was_slow = False  # whether the last pass was slow
        self._last: _Size | None = None  # size of the last pass
        self._in_a_row = 0  # consecutive passes of that size

    @property
    def is_known(self) -> bool:
        return bool(self._sizes)

    def observe(self, rows: int, seconds: float) -> float:
        """Learn from a step; return the factor by which the expected time of all sizes changed."""
        self._seen += 1
        size = self._sizes.get(_bucket(rows)) or self._between(rows)
        if size is None:
            self._sizes[_bucket(rows)] = _Size(float(rows), seconds / self._pace, 1, self._seen)
            return 1.0
        ratio = min(max(seconds / (self._pace * size.seconds), 1 / COSTS.farthest), COSTS.farthest)
        is_slow, was_slow = ratio > COSTS.pause, self._was_slow or size.was_slow
        self._was_slow = size.was_slow = is_slow
        if is_slow and not was_slow and self._seen > COSTS.recent:
            size.at = self._seen
            return 1.0
        self._in_a_row, self._last = self._in_a_row + 1 if size is self._last else 0, size
        size.returning = COSTS.recent if self._seen - size.at > COSTS.recent else max(size.returning - 1, 0)
        # Other sizes have just updated the pace, so a returning size's deviation is its own.
        pace, own = (
            (COSTS.shape_memory, COSTS.return_memory)
            if size.returning
            else (COSTS.memory, COSTS.shape_memory)
        )
        faster: float = ratio ** max(pace, 1 / self._seen)
        # A long run of one size carries no information about its cost relative to others.
        weight = max(own if self._in_a_row < COSTS.recent else 0.0, 1 / (size.seen + 1))
        self._pace *= faster
        size.rows += weight * (rows - size.rows)
        size.at, size.seen = self._seen, size.seen + 1
        shape = min(max(ratio / faster, 1 / COSTS.pause), COSTS.pause) ** weight
        size.seconds *= shape
        self._neighbours_follow(size, shape)
        return faster

    def _neighbours_follow(self, size: _Size, shape: float) -> None:
        """Apply a size's change to nearby unseen sizes, weighted by distance if another seen size bounds them."""
        lower: _Size | None = None
        between: list[_Size] = []
        for one in [*sorted(self._sizes.values(), key=lambda one: one.rows), None]:
            if one is not None and (not one.at or self._seen - one.at > COSTS.unseen):
                between.append(one)
                continue
            if size is lower or size is one:
                for unseen in between:
                    part = 1.0
                    if lower is not None and one is not None:
                        part = 1 - abs(unseen.rows - size.rows) / (one.rows - lower.rows)
                    unseen.seconds *= shape**part
            lower, between = one, []

    def _between(self, rows: int) -> _Size | None:
        """Add a size interpolated from its neighbours; return None outside the known range."""
        points = self.points()
        if not points or not points[0][0] < rows < points[-1][0]:
            return None
        found = _Size(float(rows), _at(points, rows) / self._pace, COSTS.profile_passes // 2)
        self._sizes[_bucket(rows)] = found
        return found

    def begin_with(self, points: Iterable[tuple[float, float]]) -> None:
        """Start from (rows, seconds) that were measured earlier."""
        for rows, seconds in points:
            self._sizes.setdefault(
                _bucket(round(rows)), _Size(rows, seconds / self._pace, COSTS.profile_passes)
            )

    def seconds(self, rows: int) -> float | None:
        """Return the expected seconds of a step over `rows` rows; None before the first measurement."""
        return _at(self.points(), rows) if self._sizes else None

    def table(self, most_rows: int) -> list[float] | None:
        """Return the seconds for 0 to `most_rows` rows, decreasing only between two well-measured sizes."""
        if not self._sizes:
            return None
        points = self._rising()
        (first, shortest), (last, longest) = points[0], points[-1]
        prior, size = COSTS.prior_rows, most_rows + 1
        begin, end = min(math.ceil(first), size), min(math.floor(last) + 1, size)
        known, seconds = zip(*points, strict=True)
        rows = np.arange(size)
        found = np.interp(rows, known, seconds)
        found[:begin] = shortest * (rows[:begin] + prior) / (first + prior)
        found[max(begin, end) :] = longest * (rows[max(begin, end) :] + prior) / (last + prior)
        table: list[float] = found.tolist()
        return table

    def points(self) -> list[tuple[float, float]]:
        """Return the current (rows, seconds), sorted by rows."""
        return sorted((size.rows, self._pace * size.seconds) for size in self._sizes.values())

    def _rising(self) -> list[tuple[float, float]]:
        """Return the points after averaging sizes that violate monotonicity."""
        blocks: list[_Block] = []
        for size in sorted(self._sizes.values(), key=lambda one: one.rows):
            age, is_settled = self._seen - size.at, size.seen >= COSTS.settled
            weight = min(size.seen, COSTS.settled) / (1 + age / COSTS.settled)
            block = _Block(
                weight, self._pace * size.seconds, [size.rows], is_settled and age < COSTS.forgotten
            )
            while blocks and blocks[-1].contradicts(block):
                block = blocks.pop().merged(block)
            blocks.append(block)
        return [(rows, block.seconds) for block in blocks for rows in block.rows]


def _at(points: list[tuple[float, float]], rows: int) -> float:
    place, prior = bisect_left(points, (rows, 0.0)), COSTS.prior_rows
    if 0 < place < len(points):
        (low, shorter), (high, longer) = points[place - 1], points[place]
        return shorter + (longer - shorter) * (rows - low) / (high - low)
    nearest, seconds = points[min(place, len(points) - 1)]
    return seconds * (rows + prior) / (nearest + prior)


def _bucket(rows: int) -> int:
    """Return the size bucket of a row count: eight buckets per doubling."""
    scale = max(rows.bit_length() - 4, 0)
    return (rows >> scale) << scale
