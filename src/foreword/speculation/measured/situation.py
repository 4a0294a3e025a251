"""What a policy may look at: how drafts have fared, and what steps have cost."""

from dataclasses import dataclass, field

from foreword.speculation.measured.acceptance_stats import AcceptanceStats
from foreword.speculation.report import DrafterCall, StepReport

COST_MEMORY = 0.1
"""Weight of the newest measurement in a moving average of costs."""

MAX_COHORTS = 64
"""Cohorts that are counted apart; those that come later are counted together."""

OTHER = "other"

FIRST_CHUNK = 64
"""Rows of the first step with a prompt chunk while others decode, before anything is known of its cost."""

MOST_ROWS = 1 << 16


class StepCurve:
    """The measured time of steps by their rows.

    Row counts are put in buckets, four to a doubling. Between known buckets the cost is
    interpolated; outside them it grows as `rows + PRIOR_ROWS`, which is how a small model on a CPU behaves.
    """

    PRIOR_ROWS = 4

    def __init__(self) -> None:
        self._buckets: dict[int, tuple[float, float]] = {}  # bucket -> (mean rows, mean seconds)

    def observe(self, rows: int, seconds: float) -> None:
        bucket = _bucket(rows)
        mean_rows, mean_seconds = self._buckets.get(bucket, (float(rows), seconds))
        self._buckets[bucket] = (
            mean_rows + COST_MEMORY * (rows - mean_rows),
            mean_seconds + COST_MEMORY * (seconds - mean_seconds),
        )

    def seconds(self, rows: int) -> float | None:
        """Expected time of a step over this many rows; None before the first was measured."""
        points = self.points()
        if not points:
            return None
        below = [point for point in points if point[0] <= rows]
        above = [point for point in points if point[0] >= rows]
        if below and above:
            (x0, y0), (x1, y1) = below[-1], above[0]
            return y0 if x1 == x0 else y0 + (y1 - y0) * (rows - x0) / (x1 - x0)
        at, seconds = below[-1] if below else above[0]
        return seconds * (rows + self.PRIOR_ROWS) / (at + self.PRIOR_ROWS)

    def points(self) -> list[tuple[float, float]]:
        """What was measured: (rows, seconds), by rows."""
        return sorted(self._buckets.values())


class CallCost:
    """A drafter's call as a + b * levels: a lookup costs the same at any depth, a model a pass per level.

    Least squares over calls that fade; while only one depth was seen, all of the cost is taken for `a`. The first call
    says nothing: it fills caches, and a drafter that it made look dear would never be asked again.
    """

    def __init__(self) -> None:
        self._is_warm = False
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, levels: int, seconds: float) -> None:
        if not self._is_warm:
            self._is_warm = True
            return
        keep = 1 - COST_MEMORY
        self._weight = keep * self._weight + 1
        self._x = keep * self._x + levels
        self._y = keep * self._y + seconds
        self._xx = keep * self._xx + levels * levels
        self._xy = keep * self._xy + levels * seconds

    def seconds(self, levels: int) -> float:
        """Expected time of a call; 0 before the first was measured."""
        if not self._weight:
            return 0.0
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - x * x
        slope = (self._xy / self._weight - x * y) / spread if spread > 1e-6 else 0.0
        slope = min(max(slope, 0.0), y / x if x else 0.0)  # neither part of the cost is negative
        return y + slope * (levels - x)


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
        seconds = report.seconds.total - report.seconds.draft
        if report.decodes_only:
            self._band(report.longest_context).observe(report.rows, seconds)
        else:
            self._prompts.observe(report.rows, seconds)
            rate = report.rows / max(seconds, 1e-9)
            self._prompt_rate = rate if self._prompt_rate is None else (self._prompt_rate + rate) / 2

    def step_seconds(self, rows: int, context: int = 0) -> float | None:
        """Expected time of a step that decodes this many rows; None before anything was measured."""
        near = [self._band(context), *self._decoding, self._prompts]
        return next((found for curve in near if (found := curve.seconds(rows)) is not None), None)

    def prompt_rows_within(self, seconds: float) -> int:
        """Rows of a step with prompt chunks that takes this long; a cautious number before one was measured.

        By the rate of late, which follows what it is told: a slow first pass is soon forgotten.
        """
        if self._prompt_rate is None:
            return FIRST_CHUNK
        return max(1, min(int(self._prompt_rate * seconds), MOST_ROWS))

    def draft_seconds(self, method: str, levels: int) -> float:
        """Expected time of a drafter's call; 0 before the first was measured."""
        cost = self._calls.get(method)
        return 0.0 if cost is None else cost.seconds(levels)

    def _observe_call(self, call: DrafterCall) -> None:
        self._calls.setdefault(call.method, CallCost()).observe(call.levels, call.seconds)

    def _band(self, context: int) -> StepCurve:
        return self._decoding[sum(context >= bound for bound in self.CONTEXT_BANDS)]


def _bucket(rows: int) -> int:
    """Four buckets to a doubling."""
    scale = max(rows.bit_length() - 3, 0)
    return (rows >> scale) << scale


def cohort_name(method: str, cohort: str) -> str:
    """Requests of one cohort, by who was asked to draft for them; empty: nobody."""
    return f"{method or 'plain'}/{cohort}"


@dataclass
class Situation:
    """All that was measured so far, and the switch for the whole engine."""

    speculating: bool = True  # False: everyone decodes plainly
    costs: StepCosts = field(default_factory=StepCosts)
    cohorts: dict[str, AcceptanceStats] = field(default_factory=dict)

    def learn(self, report: StepReport) -> None:
        """Take one step into account."""
        self.costs.observe(report)
        for part in report.requests:
            if part.applied:
                cohort = self._cohort(cohort_name(part.asked, part.request.cohort))
                judged = part.verdict.judged
                beyond = len(part.draft) - len(judged)
                for stats in (part.request.acceptance, cohort):
                    stats.observe(bool(part.asked), judged, len(part.verdict.path), beyond)

    def _cohort(self, name: str) -> AcceptanceStats:
        if name not in self.cohorts and len(self.cohorts) >= MAX_COHORTS:
            name = OTHER
        return self.cohorts.setdefault(name, AcceptanceStats())
