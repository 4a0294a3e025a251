"""Expected time of steps and of drafters' calls, from measured ones."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from foreword.speculation.measured.calls import CallCost
from foreword.speculation.measured.curve import CostCurve
from foreword.speculation.measured.settings import COSTS
from foreword.speculation.report import DrafterCall, StepReport

FIRST_CHUNK, LONG_CHUNK = 64, 256
"""Rows of the first step with a prompt, before its cost is known; rows from which on more are no faster."""

MOST_ROWS, SLOWEST, MOST_METHODS = 1 << 16, 3600.0, 256
"""Bounds of what is saved: rows and seconds of a step, drafters."""

OTHER_SHAPE = 1.2
"""Ratio between the slow-downs of two sizes from which on a curve has another shape; less is judging, or noise."""


class StepCosts:
    """The cost of whole steps beside drafting, and of drafting.

    A step's time is all of its wall time except its drafters': on a GPU a pass has only been launched when `forward`
    returns. Steps with prompts are kept apart from those that only decode, and contexts, as the mean over a step's
    requests, from those half as long: on a CPU a pass over a long text takes twice as long as over a short one.
    """

    CONTEXT_BANDS = tuple(128 << doubling for doubling in range(9))

    def __init__(self) -> None:
        self._decoding = [CostCurve() for _ in range(len(self.CONTEXT_BANDS) + 1)]
        self._prompts = CostCurve()
        self._context = 0  # of the last step that only decoded
        self._prompt_rate: float | None = None  # rows per second of recent steps with prompts
        self._fastest: dict[int, float] = {}  # the best of these rates, by the bits of the number of rows
        self._calls: dict[str, CallCost] = {}
        self._pace = 0.0  # logarithm of how slow the machine is, by steps alone
        self._paces: dict[str, float] = {}  # the same at a drafter's recent calls

    def observe(self, report: StepReport) -> None:
        """Learn from a step, unless it was repeated, or compiled or captured something."""
        for call in report.calls:
            if not call.is_cold:
                self._observe_call(call)
        if not report.rows or report.passes != 1 or report.is_cold:
            return
        seconds = max(report.seconds.total - report.seconds.draft, 1e-9)
        if report.decodes_only:
            self._context = report.mean_context
            self._pace += math.log(self._begun_band(self._context).observe(report.rows, seconds))
        else:
            self._prompts.observe(report.rows, seconds)
            rate = report.rows / seconds
            self._prompt_rate = rate if self._prompt_rate is None else (self._prompt_rate + rate) / 2
            size = report.rows.bit_length()
            self._fastest[size] = max(rate, self._fastest.get(size, 0.0))

    def _observe_call(self, call: DrafterCall) -> None:
        pace = self._paces.get(call.method, self._pace)
        self._paces[call.method] = pace + COSTS.memory * (self._pace - pace)
        cost = self._calls.setdefault(call.method, CallCost())
        cost.observe(call.levels, call.seconds, call.asks, call.lag)

    def begin_with(self, context: int, points: Iterable[tuple[float, float]]) -> None:
        """Take the (rows, seconds) of passes at this context that were measured before."""
        self._decoding[self.band(context)].begin_with(points)

    def begin_with_calls(self, calls: Mapping[str, Sequence[float]], *, are_saved: bool = False) -> None:
        """Take the cost of drafters' calls, as `as_json` writes it, for drafters without measured calls.

        Saved ones were measured by another process: they change with the pace of this one.
        """
        for method, cost in {name: CallCost.from_json(saved) for name, saved in calls.items()}.items():
            self._calls.setdefault(method, cost)
            if are_saved:
                self._paces.setdefault(method, 0.0)

    def resembles(self, measured: Iterable[tuple[float, float]]) -> bool:
        """Return whether passes take the same time as `measured`, (rows, seconds), but for one factor for all of them.

        Steps soon correct one factor for all sizes, but not what more rows add.
        """
        factors = [seconds / known for rows, seconds in measured if (known := self.step_seconds(round(rows)))]
        return not factors or max(factors) < OTHER_SHAPE * min(factors)

    def points(self) -> list[tuple[int, list[tuple[float, float]]]]:
        """Return what is known of decoding: the least context of each band, and its (rows, seconds)."""
        bands = zip((0, *self.CONTEXT_BANDS), self._decoding, strict=True)
        return [(context, curve.points()) for context, curve in bands if curve.is_known]

    def as_json(self) -> dict[str, Any]:
        """Return plain values that `restore` reads."""
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
        self._paces |= dict.fromkeys(calls, 0.0)

    def step_seconds(self, rows: int, context: int = 0) -> float | None:
        """Return the expected time of a step that decodes this many rows; None before anything was measured."""
        return next((found for one in self._near(context) if (found := one.seconds(rows)) is not None), None)

    def step_table(self, most_rows: int, context: int = 0) -> list[float] | None:
        """Return the same for every number of rows up to this one."""
        return next((found for one in self._near(context) if (found := one.table(most_rows))), None)

    def prompt_rows_within(self, seconds: float) -> int:
        """Return the rows of a step with prompts that takes this long; few before one was measured."""
        if self._prompt_rate is None:
            return FIRST_CHUNK
        return max(1, min(int(self._prompt_rate * seconds), MOST_ROWS))

    def rows_within(self, seconds: float, most: int, with_prompts: bool) -> int:
        """Return the most rows of a step that takes no longer than that, at most `most`.

        Before anything was measured: all rows of a step that only decodes, few of one with prompts. A step in which
        every prompt gets one row counts as decoding, so that both have to fit.
        """
        near = self._near(self._context)
        fit = _rows_below(next((curve for curve in near if curve.is_known), None), seconds, most)
        if not with_prompts:
            return fit
        known = self._prompts if self._prompts.is_known else None
        return min(fit, _rows_below(known, seconds, most if known is not None else min(most, FIRST_CHUNK)))

    def least_prompt_seconds(self, rows: int) -> float:
        """Return the least time of so many rows of prompts, at the best rate seen; 0 where only shorter chunks were."""
        is_known = any(size >= min(rows, LONG_CHUNK).bit_length() for size in self._fastest)
        return rows / max(self._fastest.values()) if is_known else 0.0

    def draft_seconds(self, method: str, levels: float, asks: int = 1) -> float:
        """Return the expected time of a drafter's call for `asks` requests; 0 before the first was measured.

        What has made steps slower or faster since its last calls has done the same to the drafter.
        """
        cost = self._calls.get(method)
        return 0.0 if cost is None else cost.seconds(levels, asks) * self._slower_since(method)

    def _slower_since(self, method: str) -> float:
        slower = math.exp(self._pace - self._paces.get(method, self._pace))
        return min(max(slower, 1 / COSTS.farthest), COSTS.farthest)

    def lag_seconds(self, method: str) -> float:
        """Return what a drafter's call takes longer for every token that it has to catch up with."""
        cost = self._calls.get(method)
        return 0.0 if cost is None else cost.lag_seconds

    def knows_calls(self, method: str) -> bool:
        """Return whether `draft_seconds` was measured for this drafter."""
        cost = self._calls.get(method)
        return cost is not None and cost.is_known

    def band(self, context: int) -> int:
        """Return the band of a context; contexts of one band are expected to cost the same."""
        return bisect_right(self.CONTEXT_BANDS, context)

    def _begun_band(self, context: int) -> CostCurve:
        """Return the band of a context; a new one starts from what is known of the others."""
        band = self._decoding[self.band(context)]
        if not band.is_known:
            known = next((curve for curve in self._near(context)[:-1] if curve.is_known), None)
            if known is not None:
                band.begin_with(known.points())
        return band

    def _near(self, context: int) -> list[CostCurve]:
        """Return the band of a context, the shorter ones from the nearest on, the longer ones, and prompts."""
        band = self.band(context)
        return [*self._decoding[band::-1], *self._decoding[band + 1 :], self._prompts]


def _rows_below(curve: CostCurve | None, seconds: float, most: int) -> int:
    table = None if curve is None else curve.table(most)
    return most if table is None else bisect_right(table, seconds) - 1
