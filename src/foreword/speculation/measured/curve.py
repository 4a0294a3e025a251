"""The time of steps by tokens in the pass: monotone, piecewise linear, exponentially weighted."""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from foreword.speculation.measured.settings import COSTS

RECENT = 8
"""Steps after which a size counts as not seen recently; as many after its return, or in a row, tell its own cost."""

UNSEEN, FORGOTTEN = 64, 1000
"""Steps after which a size follows its neighbours, and after which it is no evidence against monotony."""

NOISE = 1.03
"""Ratio up to which a shorter pass that looks slower than a longer one is taken for noise."""


@dataclass
class _Size:
    """Passes of one bucket of sizes."""

    rows: float  # mean
    seconds: float  # mean, without the pace
    seen: int  # passes
    at: int = 0  # number of the last of them
    returning: int = 0  # passes that still count as its return
    was_slow: bool = False  # the last of them


class _Block(NamedTuple):
    """Sizes that are expected to take the same time."""

    weight: float
    seconds: float
    rows: list[float]
    is_settled: bool

    def contradicts(self, longer: "_Block") -> bool:
        """Return whether noise makes it look slower than a longer pass."""
        noise = NOISE if self.is_settled and longer.is_settled else math.inf
        return longer.seconds < self.seconds < noise * longer.seconds

    def merged(self, longer: "_Block") -> "_Block":
        weight = self.weight + longer.weight
        seconds = (self.weight * self.seconds + longer.weight * longer.seconds) / weight
        return _Block(weight, seconds, self.rows + longer.rows, self.is_settled and longer.is_settled)


class CostCurve:
    """Expected seconds = pace × the size's own seconds.

    The pace follows every pass, so that a busy core slows all sizes at once. A size's own seconds follow what it does
    beside the others, slowly. Sizes are bucketed, eight to a doubling; between them the curve is linear, outside it
    grows as rows + `prior_rows`.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._pace = 1.0
        self._seen = 0  # passes
        self._was_slow = False  # the last of them
        self._last: _Size | None = None  # its size
        self._in_a_row = 0  # passes of that size

    @property
    def is_known(self) -> bool:
        return bool(self._sizes)

    def observe(self, rows: int, seconds: float) -> float:
        """Learn from a step; return the factor by which all sizes are expected to take longer now."""
        self._seen += 1
        size = self._sizes.get(_bucket(rows)) or self._between(rows)
        if size is None:
            self._sizes[_bucket(rows)] = _Size(float(rows), seconds / self._pace, 1, self._seen)
            return 1.0
        ratio = min(max(seconds / (self._pace * size.seconds), 1 / COSTS.farthest), COSTS.farthest)
        is_slow, was_slow = ratio > COSTS.pause, self._was_slow or size.was_slow
        self._was_slow = size.was_slow = is_slow
        if is_slow and not was_slow and self._seen > RECENT:
            size.at = self._seen
            return 1.0
        self._in_a_row, self._last = self._in_a_row + 1 if size is self._last else 0, size
        size.returning = RECENT if self._seen - size.at > RECENT else max(size.returning - 1, 0)
        # Other sizes have just set the pace: what is new about a size that returns is its own.
        pace, own = (
            (COSTS.shape_memory, COSTS.return_memory)
            if size.returning
            else (COSTS.memory, COSTS.shape_memory)
        )
        faster: float = ratio ** max(pace, 1 / self._seen)
        # A long run of one size tells nothing of what it costs beside the others.
        weight = max(own if self._in_a_row < RECENT else 0.0, 1 / (size.seen + 1))
        self._pace *= faster
        size.rows += weight * (rows - size.rows)
        size.at, size.seen = self._seen, size.seen + 1
        shape = min(max(ratio / faster, 1 / COSTS.pause), COSTS.pause) ** weight
        size.seconds *= shape
        self._neighbours_follow(size, shape)
        return faster

    def _neighbours_follow(self, size: _Size, shape: float) -> None:
        """Apply a size's change to the sizes around it that were not seen for long, in part where others are nearer."""
        lower: _Size | None = None
        between: list[_Size] = []
        for one in [*sorted(self._sizes.values(), key=lambda one: one.rows), None]:
            if one is not None and (not one.at or self._seen - one.at > UNSEEN):
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
        """Add a size that starts from its neighbours; None at either end."""
        points = self.points()
        if not points or not points[0][0] < rows < points[-1][0]:
            return None
        found = _Size(float(rows), _at(points, rows) / self._pace, COSTS.profile_passes // 2)
        self._sizes[_bucket(rows)] = found
        return found

    def begin_with(self, points: Iterable[tuple[float, float]]) -> None:
        """Take (rows, seconds) that were measured before, until steps are measured."""
        for rows, seconds in points:
            self._sizes.setdefault(
                _bucket(round(rows)), _Size(rows, seconds / self._pace, COSTS.profile_passes)
            )

    def seconds(self, rows: int) -> float | None:
        """Return the expected time of a step over this many rows; None before the first was measured."""
        return _at(self.points(), rows) if self._sizes else None

    def table(self, most_rows: int) -> list[float] | None:
        """Return the same for 0 to `most_rows` rows, falling only where both sizes are well measured."""
        if not self._sizes:
            return None
        points, prior = self._rising(), COSTS.prior_rows
        (first, at_first), (last, at_last) = points[0], points[-1]
        found = [
            at_first * (rows + prior) / (first + prior)
            for rows in range(min(math.ceil(first), most_rows + 1))
        ]
        for (low, shorter), (high, longer) in pairwise(points):
            slope = (longer - shorter) / (high - low)
            end = min(math.ceil(high), most_rows + 1)
            found += [shorter + slope * (rows - low) for rows in range(len(found), end)]
        return found + [
            at_last * (rows + prior) / (last + prior) for rows in range(len(found), most_rows + 1)
        ]

    def points(self) -> list[tuple[float, float]]:
        """Return what was measured: (rows, seconds), by rows."""
        return sorted((size.rows, self._pace * size.seconds) for size in self._sizes.values())

    def _rising(self) -> list[tuple[float, float]]:
        """Return the points; sizes that contradict monotony get their common mean."""
        blocks: list[_Block] = []
        for size in sorted(self._sizes.values(), key=lambda one: one.rows):
            age, is_settled = self._seen - size.at, size.seen >= COSTS.settled
            weight = min(size.seen, COSTS.settled) / (1 + age / COSTS.settled)
            block = _Block(weight, self._pace * size.seconds, [size.rows], is_settled and age < FORGOTTEN)
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
    """Return the bucket of a size: eight to a doubling."""
    scale = max(rows.bit_length() - 4, 0)
    return (rows >> scale) << scale
