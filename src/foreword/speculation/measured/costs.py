"""Expected times of steps and drafter calls, from measurements."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from foreword.speculation.measured.calls import CallCost
from foreword.speculation.measured.curve import CostCurve
from foreword.speculation.measured.settings import COSTS
from foreword.speculation.report import DrafterCall, StepReport

MOST_ROWS, SLOWEST, MOST_METHODS = 1 << 16, 3600.0, 256
"""Limits of saved values: rows per step, seconds per step, number of drafters."""


class StepCosts:
    """Expected cost of steps (without drafting) and of drafter calls.

    A step's time is its wall time without its drafters: on a GPU, `forward` returns once the pass is launched. The time
    in which drafters observe a decode step is part of their calls. Otherwise the target would seem slower, also in
    plain steps, and drafts would seem to gain.

    Steps with prompts have their own curve. Decode steps have one curve per band of mean context length, because a pass
    over a long context takes up to twice as long on a CPU.
    """

    CONTEXT_BANDS = tuple(128 << doubling for doubling in range(9))

    def __init__(self) -> None:
        self._decoding = [CostCurve() for _ in range(len(self.CONTEXT_BANDS) + 1)]
        self._prompts = CostCurve()
        self._context = 0  # mean context of the last decode step
        self._prompt_rate: float | None = None  # recent prompt rows per second
        self._fastest: dict[int, float] = {}  # highest prompt rate by bit length of the row count
        self._calls: dict[str, CallCost] = {}
        # By drafter: seconds of observing per request, in the last decode step with a call.
        self._observing: dict[str, float] = {}
        self._pace = 0.0  # log of the machine's current slowness, from steps only
        self._paces: dict[str, float] = {}  # value of `_pace` at each drafter's recent calls

    def observe(self, report: StepReport) -> None:
        """Learn from a step. Ignore steps that were retried, and passes or calls that compiled or captured a graph."""
        observing = [call for call in report.calls if call.is_observing]
        if observing and report.decodes_only and not report.is_cold:
            per_request = report.seconds.observe / sum([call.requests for call in observing])
            self._observing |= {call.method: per_request for call in observing}
        for call in report.calls:
            if not call.is_cold:
                self._observe_call(call)
        if not report.rows or report.passes != 1 or report.is_cold:
            return
        spent = report.seconds
        seconds = max(spent.total - spent.draft, 1e-9)
        if report.decodes_only:
            seconds = max(seconds - spent.observe, 1e-9)
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
        # Observing a prompt belongs to no call, so a step with prompts counts like the last one without.
        seconds = call.seconds + self._observing.get(call.method, 0.0) * call.requests
        cost.observe(call.levels, seconds, call.requests, call.lag)

    def begin_with(self, context: int, points: Iterable[tuple[float, float]]) -> None:
        """Start from (rows, seconds) of passes measured earlier at this context."""
        self._decoding[self.band(context)].begin_with(points)

    def begin_with_calls(self, calls: Mapping[str, Sequence[float]], *, are_saved: bool = False) -> None:
        """Start from saved call costs (`as_json`), for drafters without measured calls.

        `are_saved`: another process measured them, so that they scale with the pace of this one.
        """
        for method, cost in {name: CallCost.from_json(saved) for name, saved in calls.items()}.items():
            self._calls.setdefault(method, cost)
            if are_saved:
                self._paces.setdefault(method, 0.0)

    def resembles(self, measured: Iterable[tuple[float, float]]) -> bool:
        """Return whether `measured` (rows, seconds) equals the known curve up to one common factor.

        Observed steps correct a common factor quickly, but not a different cost per row.
        """
        factors = [seconds / known for rows, seconds in measured if (known := self.step_seconds(round(rows)))]
        return not factors or max(factors) < COSTS.other_shape * min(factors)

    def points(self) -> list[tuple[int, list[tuple[float, float]]]]:
        """Return the decode curves: each band's lowest context and its (rows, seconds)."""
        bands = zip((0, *self.CONTEXT_BANDS), self._decoding, strict=True)
        return [(context, curve.points()) for context, curve in bands if curve.is_known]

    def as_json(self) -> dict[str, Any]:
        """Return plain values that `restore` reads."""
        newest = list(self._calls.items())[-MOST_METHODS:]
        calls = {method: cost.as_json(self._slower_since(method)) for method, cost in newest}
        return {"steps": self.points(), "calls": calls}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Start from what `as_json` returned; raise `ValueError` and change nothing for anything else."""
        try:
            bands = [
                (int(context), [(float(r), float(s)) for r, s in points])
                for context, points in saved["steps"]
            ]
            calls = {str(method): CallCost.from_json(cost) for method, cost in saved["calls"].items()}
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"saved costs cannot be read: {error}") from None
        known = [point for _, points in bands for point in points]
        if not all(0 < rows <= MOST_ROWS and 0 < seconds < SLOWEST for rows, seconds in known):
            raise ValueError("saved step costs are out of range")
        for context, points in bands:
            self.begin_with(context, points)
        self._calls.update(list(calls.items())[-MOST_METHODS:])
        self._paces |= dict.fromkeys(calls, 0.0)

    def step_seconds(self, rows: int, context: int = 0) -> float | None:
        """Return the expected seconds of a decode step of this many rows; None before the first measurement."""
        return next((found for one in self._near(context) if (found := one.seconds(rows)) is not None), None)

    def step_table(self, most_rows: int, context: int = 0) -> list[float] | None:
        """Return `step_seconds` for 0 to `most_rows` rows."""
        return next((found for one in self._near(context) if (found := one.table(most_rows))), None)

    def prompt_rows_within(self, seconds: float) -> int:
        """Return the rows of a prompt step that takes this long; `first_chunk` before the first measurement."""
        if self._prompt_rate is None:
            return COSTS.first_chunk
        return max(1, min(int(self._prompt_rate * seconds), MOST_ROWS))

    def rows_within(self, seconds: float, most: int, with_prompts: bool) -> int:
        """Return the largest row count, at most `most`, of a step within this time.

        Before any measurement: `most` for decode steps, `first_chunk` with prompts. A step in which every prompt gets
        one row counts as decoding, so with prompts both limits apply.
        """
        near = self._near(self._context)
        fit = _rows_below(next((curve for curve in near if curve.is_known), None), seconds, most)
        if not with_prompts:
            return fit
        known = self._prompts if self._prompts.is_known else None
        return min(
            fit, _rows_below(known, seconds, most if known is not None else min(most, COSTS.first_chunk))
        )

    def least_prompt_seconds(self, rows: int) -> float:
        """Return the minimum seconds for `rows` prompt rows at the best rate seen; 0 if only shorter chunks
        were seen."""
        is_known = any(size >= min(rows, COSTS.long_chunk).bit_length() for size in self._fastest)
        return rows / max(self._fastest.values()) if is_known else 0.0

    def draft_seconds(self, method: str, levels: float, asks: int = 1) -> float:
        """Return the expected seconds of a drafter call for `asks` requests, and of observing their next pass.

        0 before the first measurement.

        The estimate follows the pace of steps since the drafter's recent calls.
        """
        cost = self._calls.get(method)
        return 0.0 if cost is None else cost.seconds(levels, asks) * self._slower_since(method)

    def _slower_since(self, method: str) -> float:
        slower = math.exp(self._pace - self._paces.get(method, self._pace))
        return min(max(slower, 1 / COSTS.farthest), COSTS.farthest)

    def lag_seconds(self, method: str) -> float:
        """Return the extra seconds per token that a drafter has to catch up."""
        cost = self._calls.get(method)
        return 0.0 if cost is None else cost.lag_seconds

    def knows_calls(self, method: str) -> bool:
        """Return whether enough calls of this drafter were measured."""
        cost = self._calls.get(method)
        return cost is not None and cost.is_known

    def band(self, context: int) -> int:
        """Return the index of a context's band. Contexts of one band share a cost curve."""
        return bisect_right(self.CONTEXT_BANDS, context)

    def _begun_band(self, context: int) -> CostCurve:
        """Return the curve of a context's band; a new band starts from the nearest known one."""
        band = self._decoding[self.band(context)]
        if not band.is_known:
            known = next((curve for curve in self._near(context)[:-1] if curve.is_known), None)
            if known is not None:
                band.begin_with(known.points())
        return band

    def _near(self, context: int) -> list[CostCurve]:
        """Return the curves by nearness to a context: its band, shorter ones, longer ones, prompts."""
        band = self.band(context)
        return [*self._decoding[band::-1], *self._decoding[band + 1 :], self._prompts]


def _rows_below(curve: CostCurve | None, seconds: float, most: int) -> int:
    table = None if curve is None else curve.table(most)
    return most if table is None else bisect_right(table, seconds) - 1
