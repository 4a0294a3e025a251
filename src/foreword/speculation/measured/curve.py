"""Step time by rows in the pass: a piecewise linear, monotone curve with exponential forgetting."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreword.speculation.measured.settings import COSTS


@dataclass(slots=True)
class _Size:
    """Statistics of passes in one size bucket."""

    rows: float  # mean rows
    seconds: float  # mean seconds, divided by the pace
    seen: int  # number of passes
    at: int = 0  # index of the last pass
    returning: int = 0  # remaining passes that count as its return
    was_slow: bool = False  # whether the last pass was slow


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
        has_returned = self._seen - size.at > COSTS.recent
        size.returning = COSTS.recent if has_returned else max(size.returning - 1, 0)
        pace, own = COSTS.memory, COSTS.shape_memory
        if size.returning:  # other sizes have just updated the pace, so that the deviation is its own
            pace, own = COSTS.shape_memory, COSTS.return_memory
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
        """Apply a size's change to unseen sizes up to the next seen ones, weighted by distance between two of those."""
        ordered = sorted(self._sizes.values(), key=lambda one: one.rows)
        is_seen = [bool(one.at) and self._seen - one.at <= COSTS.unseen for one in ordered]
        place = ordered.index(size)
        for direction in (-1, 1):
            end = place + direction
            while 0 <= end < len(ordered) and not is_seen[end]:
                end += direction
            for unseen in ordered[place + direction : end if end >= 0 else None : direction]:
                part = 1.0
                if 0 <= end < len(ordered):
                    part = 1 - (unseen.rows - size.rows) / (ordered[end].rows - size.rows)
                unseen.seconds *= shape**part

    def _between(self, rows: int) -> _Size | None:
        """Add a size interpolated from its neighbours; return None outside the known range."""
        points = self.points()
        if not points or not points[0][0] < rows < points[-1][0]:
            return None
        seconds = _interpolated(points, np.array([rows]))[0] / self._pace
        found = self._sizes[_bucket(rows)] = _Size(float(rows), seconds, COSTS.profile_passes // 2)
        return found

    def begin_with(self, points: Iterable[tuple[float, float]]) -> None:
        """Start from (rows, seconds) that were measured earlier."""
        for rows, seconds in points:
            known = _Size(rows, seconds / self._pace, COSTS.profile_passes)
            self._sizes.setdefault(_bucket(round(rows)), known)

    def seconds(self, rows: int) -> float | None:
        """Return the expected seconds of a step over `rows` rows; None before the first measurement."""
        return _interpolated(self.points(), np.array([rows]))[0] if self._sizes else None

    def table(self, most_rows: int) -> list[float] | None:
        """Return the seconds for 0 to `most_rows` rows, decreasing only between two well-measured sizes."""
        return _interpolated(self._rising(), np.arange(most_rows + 1)) if self._sizes else None

    def points(self) -> list[tuple[float, float]]:
        """Return the current (rows, seconds), sorted by rows."""
        return sorted((size.rows, self._pace * size.seconds) for size in self._sizes.values())

    def _rising(self) -> list[tuple[float, float]]:
        """Return the points after averaging neighbours of which the shorter is slower, by noise or on old evidence."""
        blocks: list[tuple[float, float, list[float], bool]] = []  # (weight, seconds, rows, is well measured)
        for size in sorted(self._sizes.values(), key=lambda one: one.rows):
            age, is_known = self._seen - size.at, size.seen >= COSTS.settled
            weight = min(size.seen, COSTS.settled) / (1 + age / COSTS.settled)
            seconds, rows = self._pace * size.seconds, [size.rows]
            is_known = is_known and age < COSTS.forgotten
            while blocks:
                other, longer, before, was_known = blocks[-1]
                noise = COSTS.noise if is_known and was_known else math.inf
                if not seconds < longer < noise * seconds:
                    break
                blocks.pop()
                seconds = (weight * seconds + other * longer) / (weight + other)
                weight, rows, is_known = weight + other, before + rows, is_known and was_known
            blocks.append((weight, seconds, rows, is_known))
        return [(rows, seconds) for _, seconds, some, _ in blocks for rows in some]


def _interpolated(points: Sequence[tuple[float, float]], rows: NDArray[np.int64]) -> list[float]:
    """Return the seconds at these rows."""
    known, seconds = np.array(points).T
    inside = np.clip(rows, known[0], known[-1])
    scale = (rows + COSTS.prior_rows) / (inside + COSTS.prior_rows)
    found: list[float] = (np.interp(inside, known, seconds) * scale).tolist()
    return found


def _bucket(rows: int) -> int:
    """Return the size bucket of a row count: eight buckets per doubling."""
    scale = max(rows.bit_length() - 4, 0)
    return (rows >> scale) << scale
