"""What steps and drafters' calls have cost, and so what the next ones will."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from foreword.speculation.report import DrafterCall, StepReport

FIRST_CHUNK = 64
"""Rows of the first step with a prompt chunk while others decode, before anything is known of its cost."""

MOST_ROWS = 1 << 16

DRIFT_MEMORY = 0.1
"""Weight of the newest step in what all row counts share: another process, a clock, a longer context."""

SHAPE_MEMORY = 0.02
"""Weight of the newest step in what its own row count costs beside the others, once enough were seen."""

FARTHEST = 4.0
"""A step counts as at most this many times as slow, or as fast, as was expected: one pause is no change."""

UNCHANGED = 0.25
TINY = 1e-3
"""Less than this a number of levels or asks has not changed."""

ENOUGH_CALLS = 8
"""Calls after which the cost of one depth is believed to hold for others."""

PROFILED = 8
"""Steps that a measurement at start-up counts as."""


@dataclass
class _Bucket:
    rows: float  # mean
    seconds: float  # mean, without the drift
    seen: int  # steps


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

    def observe(self, rows: int, seconds: float) -> None:
        known = self._buckets.get(_bucket(rows))
        if known is None:
            self._buckets[_bucket(rows)] = _Bucket(float(rows), seconds / self._drift, 1)
            return
        expected = self._drift * known.seconds
        seconds = min(max(seconds, expected / FARTHEST), expected * FARTHEST)
        self._drift *= (seconds / expected) ** DRIFT_MEMORY
        weight = max(SHAPE_MEMORY, 1 / (known.seen + 1))
        known.rows += weight * (rows - known.rows)
        known.seconds += weight * (seconds / self._drift - known.seconds)
        known.seen += 1

    def begin_with(self, points: Iterable[tuple[float, float]]) -> None:
        """Take (rows, seconds) that were measured before, until steps tell better."""
        for rows, seconds in points:
            self._buckets.setdefault(_bucket(round(rows)), _Bucket(rows, seconds / self._drift, PROFILED))

    def seconds(self, rows: int) -> float | None:
        """Expected time of a step over this many rows; None before the first was measured."""
        return float(self._expected(np.array([rows]))[0]) if self._buckets else None

    def table(self, most_rows: int) -> list[float] | None:
        """The same for 0 to `most_rows` rows, never falling: what noise says of a longer pass is not believed."""
        if not self._buckets:
            return None
        found: list[float] = np.maximum.accumulate(self._expected(np.arange(most_rows + 1))).tolist()
        return found

    def points(self) -> list[tuple[float, float]]:
        """What was measured: (rows, seconds), by rows."""
        return sorted((known.rows, self._drift * known.seconds) for known in self._buckets.values())

    def _expected(
        self, rows: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    ) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        at, seconds = np.array(self.points()).T
        nearest = np.clip(rows, at[0], at[-1])
        beyond = (rows + self.PRIOR_ROWS) / (nearest + self.PRIOR_ROWS)
        return np.asarray(np.interp(nearest, at, seconds) * beyond, np.float64)


class CallCost:
    """A drafter's call by its levels and asks: a lookup costs the same at any depth, a model a pass per level.

    Averages of late follow what a call takes; slopes are remembered longer, as the depth and the number of asks hardly
    change in some traffic. While neither has changed all of the cost counts as fixed. The first call says nothing: it
    fills caches, and a drafter that it made look dear would never be asked again.
    """

    MEMORY = 0.1
    SLOPE_MEMORY = 0.02

    def __init__(self) -> None:
        self._is_warm = False
        self._late = np.zeros(3)  # levels, asks, seconds: means of late
        self._means = np.zeros(3)
        self._spread = np.zeros((3, 3))
        self._seen = 0

    def observe(self, levels: int, seconds: float, asks: int = 1) -> None:
        if not self._is_warm:
            self._is_warm = True
            return
        call = np.array([levels, asks, seconds])
        self._seen += 1
        self._late += max(self.MEMORY, 1 / self._seen) * (call - self._late)
        weight = max(self.SLOPE_MEMORY, 1 / self._seen)
        off = call - self._means
        self._means += weight * off
        # A call like all others tells nothing of slopes, and must not make them forgotten.
        changes = (np.abs(off) >= UNCHANGED) | (self._seen <= ENOUGH_CALLS)
        changes[2] = True
        tells = np.outer(changes, changes)
        self._spread = np.where(
            tells, (1 - weight) * (self._spread + weight * np.outer(off, off)), self._spread
        )

    @property
    def is_known(self) -> bool:
        """Whether calls of different depths were measured, or enough of one."""
        return self._seen > 1 and (bool(self._spread[0, 0] > TINY) or self._seen > ENOUGH_CALLS)

    def seconds(self, levels: int, asks: int = 1) -> float:
        """Expected time of a call; 0 before the first was measured."""
        late_levels, late_asks, late_seconds = self._late.tolist()
        per_level, per_ask = self._slopes()
        # Neither part of the cost is negative.
        per_level = min(per_level, late_seconds / late_levels if late_levels else 0.0)
        left = late_seconds - per_level * late_levels
        per_ask = min(per_ask, left / late_asks if late_asks else 0.0)
        return float(late_seconds + per_level * (levels - late_levels) + per_ask * (asks - late_asks))

    def _slopes(self) -> tuple[float, float]:
        (ll, la, ls), (_, aa, as_), _ = self._spread.tolist()
        both = ll * aa - la * la
        if both > TINY * ll * aa > 0:
            per_level, per_ask = (ls * aa - as_ * la) / both, (as_ * ll - ls * la) / both
            if per_level >= 0 and per_ask >= 0:
                return per_level, per_ask
        # Only one of them explains the cost: the one that explains more of it.
        by_levels, by_asks = max(ls, 0.0) / ll if ll > TINY else 0.0, max(as_, 0.0) / aa if aa > TINY else 0.0
        return (by_levels, 0.0) if by_levels * ls > by_asks * as_ else (0.0, by_asks)


class StepCosts:
    """What whole steps cost besides drafting, and what drafting costs.

    A step's time is all of its wall time but its drafters': on a GPU a pass has only been launched when `forward`
    returns. Steps with prompt chunks are kept apart from those that only decode, and long contexts from short ones.
    """

    CONTEXT_BANDS = (1024, 8192)

    def __init__(self) -> None:
        self._decoding = [StepCurve() for _ in range(len(self.CONTEXT_BANDS) + 1)]
        self._prompts = StepCurve()
        self._prompt_rate: float | None = None  # rows per second of steps with prompt chunks
        self._calls: dict[str, CallCost] = {}

    def observe(self, report: StepReport) -> None:
        """Learn from one step; one that had to be tried again teaches nothing."""
        for call in report.calls:
            self._observe_call(call)
        if not report.rows or report.passes != 1:
            return
        seconds = max(report.seconds.total - report.seconds.draft, 1e-9)
        if report.decodes_only:
            self._band(report.longest_context).observe(report.rows, seconds)
        else:
            self._prompts.observe(report.rows, seconds)
            rate = report.rows / seconds
            self._prompt_rate = rate if self._prompt_rate is None else (self._prompt_rate + rate) / 2

    def begin_with(self, context: int, points: Iterable[tuple[float, float]]) -> None:
        """Take the (rows, seconds) of passes at this context that were measured before."""
        self._band(context).begin_with(points)

    def points(self) -> list[tuple[int, list[tuple[float, float]]]]:
        """What is known of decoding: the least context of each band, and its (rows, seconds)."""
        bands = zip((0, *self.CONTEXT_BANDS), self._decoding, strict=True)
        return [(context, curve.points()) for context, curve in bands if curve.points()]

    def step_seconds(self, rows: int, context: int = 0) -> float | None:
        """Expected time of a step that decodes this many rows; None before anything was measured."""
        return next(
            (found for curve in self._near(context) if (found := curve.seconds(rows)) is not None), None
        )

    def step_table(self, most_rows: int, context: int = 0) -> list[float] | None:
        """The same for every number of rows up to this one, for those who compare many."""
        return next((found for curve in self._near(context) if (found := curve.table(most_rows))), None)

    def prompt_rows_within(self, seconds: float) -> int:
        """Rows of a step with prompt chunks that takes this long; a cautious number before one was measured.

        By the rate of late, which follows what it is told: a slow first pass is soon forgotten.
        """
        if self._prompt_rate is None:
            return FIRST_CHUNK
        return max(1, min(int(self._prompt_rate * seconds), MOST_ROWS))

    def draft_seconds(self, method: str, levels: int, asks: int = 1) -> float:
        """Expected time of a drafter's call; 0 before the first was measured."""
        cost = self._calls.get(method)
        return 0.0 if cost is None else cost.seconds(levels, asks)

    def knows_calls(self, method: str) -> bool:
        """Whether `draft_seconds` is more than a guess."""
        cost = self._calls.get(method)
        return cost is not None and cost.is_known

    def _observe_call(self, call: DrafterCall) -> None:
        self._calls.setdefault(call.method, CallCost()).observe(call.levels, call.seconds, call.asks)

    def _band(self, context: int) -> StepCurve:
        return self._decoding[sum(context >= bound for bound in self.CONTEXT_BANDS)]

    def _near(self, context: int) -> list[StepCurve]:
        return [self._band(context), *self._decoding, self._prompts]


def _bucket(rows: int) -> int:
    """Eight buckets to a doubling."""
    scale = max(rows.bit_length() - 4, 0)
    return (rows >> scale) << scale
