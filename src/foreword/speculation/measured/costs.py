"""What steps and drafters' calls have cost, and so what the next ones will."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from foreword.speculation.measured.call_cost import CallCost
from foreword.speculation.measured.step_curve import StepCurve
from foreword.speculation.report import DrafterCall, StepReport

LONG_CHUNK = 256
"""Rows of a prompt from which on more do not go faster."""

FIRST_CHUNK = 64
"""Rows of the first step with a prompt chunk while others decode, before anything is known of its cost."""

MOST_ROWS = 1 << 16
SLOWEST = 3600.0
"""Seconds that no step takes."""

MOST_PACE = 4.0
"""Times as slow, or as fast, as a drafter is taken to have become while it was not asked."""

OTHER_SHAPE = 1.5
"""Ratio between the slow-downs of two row counts from which on a curve has another shape; less may be noise."""

MOST_METHODS = 256
"""Drafters whose calls are kept for another start."""


SAVED_PACE = 1.0
"""Pace at which saved calls count as measured: that of a process that has measured no step yet."""


class StepCosts:
    """What whole steps cost besides drafting, and what drafting costs.

    A step's time is all of its wall time but its drafters': on a GPU a pass has only been launched when `forward`
    returns. Steps with prompt chunks are kept apart from those that only decode, and contexts from those half as long.
    That is the mean one of a step's requests. On a CPU a pass over a long text takes twice as long as over a short one:
    what a single row takes behind one must not be compared with what several have taken behind the other.
    """

    CONTEXT_BANDS = tuple(128 << doubling for doubling in range(9))

    def __init__(self) -> None:
        self._decoding = [StepCurve() for _ in range(len(self.CONTEXT_BANDS) + 1)]
        self._prompts = StepCurve()
        self._context = 0  # of the last step that only decoded
        self._prompt_rate: float | None = None  # rows per second of steps with prompt chunks
        self._fastest: dict[int, float] = {}  # the best of these rates, by the bits of the number of rows
        self._calls: dict[str, CallCost] = {}
        self._pace = 1.0  # how slow the machine is, by steps alone
        self._paces: dict[str, float] = {}  # the same when a drafter was asked of late

    def observe(self, report: StepReport) -> None:
        """Learn from one step; one that had to be tried again teaches nothing, nor does one that was compiled first."""
        for call in report.calls:
            if not call.is_cold:
                self._observe_call(call)
        if not report.rows or report.passes != 1 or report.is_cold:
            return
        seconds = max(report.seconds.total - report.seconds.draft, 1e-9)
        if report.decodes_only:
            self._context = report.mean_context
            self._go_at(self._begun_band(self._context).observe(report.rows, seconds))
        else:
            self._prompts.observe(report.rows, seconds)
            rate = report.rows / seconds
            self._prompt_rate = rate if self._prompt_rate is None else (self._prompt_rate + rate) / 2
            size = report.rows.bit_length()
            self._fastest[size] = max(rate, self._fastest.get(size, 0.0))

    def begin_with(self, context: int, points: Iterable[tuple[float, float]]) -> None:
        """Take the (rows, seconds) of passes at this context that were measured before."""
        self._band(context).begin_with(points)

    def begin_with_calls(self, calls: Mapping[str, Sequence[float]], *, are_saved: bool = False) -> None:
        """Take the cost of drafters' calls, as `as_json` writes it, for drafters without measured calls.

        Saved ones were measured by another process: they change with the pace of this one.
        """
        for method, cost in {name: CallCost.from_json(saved) for name, saved in calls.items()}.items():
            self._calls.setdefault(method, cost)
            if are_saved:
                self._paces.setdefault(method, SAVED_PACE)

    def resembles(self, measured: Iterable[tuple[float, float]]) -> bool:
        """Return whether passes take the same time as `measured`, (rows, seconds), but for one factor for all of them.

        Steps soon correct one factor for all row counts, but not what more rows add.
        """
        factors = [seconds / known for rows, seconds in measured if (known := self.step_seconds(round(rows)))]
        return not factors or max(factors) < OTHER_SHAPE * min(factors)

    def points(self) -> list[tuple[int, list[tuple[float, float]]]]:
        """What is known of decoding: the least context of each band, and its (rows, seconds)."""
        bands = zip((0, *self.CONTEXT_BANDS), self._decoding, strict=True)
        return [(context, curve.points()) for context, curve in bands if curve.points()]

    def as_json(self) -> dict[str, Any]:
        """Plain values that `restore` reads."""
        newest = list(self._calls.items())[-MOST_METHODS:]
        calls = {method: cost.as_json(self._slower_since(method)) for method, cost in newest}
        return {"steps": self.points(), "calls": calls}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Begin with what `as_json` has written; raises `ValueError` and changes nothing for anything else."""
        try:
            bands = [
                (int(context), [(float(r), float(s)) for r, s in points])
                for context, points in saved["steps"]
            ]
            calls = {str(method): CallCost.from_json(cost) for method, cost in saved["calls"].items()}
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"no costs: {error}") from None
        known = [point for _, points in bands for point in points]
        if not all(0 < rows <= MOST_ROWS and 0 < seconds < SLOWEST for rows, seconds in known):
            raise ValueError("costs that no step has")
        for context, points in bands:
            self.begin_with(context, points)
        self._calls.update(list(calls.items())[-MOST_METHODS:])
        self._paces |= dict.fromkeys(calls, SAVED_PACE)

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

    def rows_within(self, seconds: float, most: int, with_prompts: bool) -> int:
        """Most rows of a step that takes no longer than that, at most `most`.

        Before anything was measured: all rows of a step that only decodes, a cautious number of one with prompts. A
        step in which every prompt gets one row counts as decoding, so that both have to fit.
        """
        near = self._near(self._context)
        fit = _rows_below(next((curve for curve in near if curve.is_known), None), seconds, most)
        if not with_prompts:
            return fit
        known = self._prompts if self._prompts.is_known else None
        return min(fit, _rows_below(known, seconds, most if known is not None else min(most, FIRST_CHUNK)))

    def least_prompt_seconds(self, rows: int) -> float:
        """What so many rows of prompts take at the very least: at the best rate that was ever seen.

        0 where only far shorter chunks were: longer ones go faster.
        """
        is_known = any(size >= min(rows, LONG_CHUNK).bit_length() for size in self._fastest)
        return rows / max(self._fastest.values()) if is_known else 0.0

    def draft_seconds(self, method: str, levels: float, asks: int = 1) -> float:
        """Expected time of a drafter's call; 0 before the first was measured.

        What has made steps slower, or faster, since it was asked has done the same to it.
        """
        cost = self._calls.get(method)
        if cost is None:
            return 0.0
        return cost.seconds(levels, asks) * self._slower_since(method)

    def _slower_since(self, method: str) -> float:
        """Return how many times as slow as in its last calls a drafter is believed to be."""
        slower = self._pace / self._paces.get(method, self._pace)
        return min(max(slower, 1 / MOST_PACE), MOST_PACE)

    def behind_seconds(self, method: str) -> float:
        """What a drafter's call takes longer for every token that it has to catch up with."""
        cost = self._calls.get(method)
        return 0.0 if cost is None else cost.per_token_behind

    def knows_calls(self, method: str) -> bool:
        """Whether `draft_seconds` is more than a guess."""
        cost = self._calls.get(method)
        return cost is not None and cost.is_known

    def _observe_call(self, call: DrafterCall) -> None:
        pace = self._paces.get(call.method, self._pace)
        self._paces[call.method] = pace + CallCost.MEMORY * (self._pace - pace)
        cost = self._calls.get(call.method)
        if cost is None:
            cost = self._calls[call.method] = CallCost()
        cost.observe(call.levels, call.seconds, call.asks, call.behind)

    def _go_at(self, slower: float) -> None:
        self._pace *= slower
        if (
            not 1e-3 < self._pace < 1e3
        ):  # bands of contexts learn apart: only what differs since an ask counts
            self._paces = {method: pace / self._pace for method, pace in self._paces.items()}
            self._pace = 1.0

    def band(self, context: int) -> int:
        """Contexts of one band are expected to cost the same."""
        return bisect_right(self.CONTEXT_BANDS, context)

    def _band(self, context: int) -> StepCurve:
        return self._decoding[self.band(context)]

    def _begun_band(self, context: int) -> StepCurve:
        """A band begins with what is known of the others: one measured row count tells nothing of what rows add."""
        band = self._band(context)
        if not band.is_known:
            known = next((curve for curve in self._near(context)[:-1] if curve.is_known), None)
            if known is not None:
                band.begin_with(known.points())
        return band

    def _near(self, context: int) -> list[StepCurve]:
        """The band of a context, those of shorter ones from the nearest on, those of longer ones, and prompts."""
        band = self.band(context)
        return [*self._decoding[band::-1], *self._decoding[band + 1 :], self._prompts]


def _rows_below(curve: StepCurve | None, seconds: float, most: int) -> int:
    table = None if curve is None else curve.table(most)
    return most if table is None else bisect_right(table, seconds) - 1
