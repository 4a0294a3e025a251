"""Limits that a request must keep to be a good one."""

import math
from dataclasses import dataclass

from foreword.bench.serve.formulas import end_to_end, time_per_output_token, time_to_first_token
from foreword.bench.serve.outcome import Ending, Outcome
from foreword.errors import RequestError


@dataclass(frozen=True)
class Limits:
    """The most milliseconds that a good request may take; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def are_met(self, outcome: Outcome) -> bool:
        """Whether the request was completed within all limits.

        An answer of fewer than two tokens has no TPOT and meets that limit; one without text meets no TTFT limit.
        """
        if outcome.ending is not Ending.COMPLETED:
            return False
        ttft = time_to_first_token(outcome)
        return (
            _within(math.inf if ttft is None else ttft, self.ttft)
            and _within(time_per_output_token(outcome) or 0.0, self.tpot)
            and _within(end_to_end(outcome) or 0.0, self.e2el)
        )


def _within(seconds: float, limit_ms: float | None) -> bool:
    return limit_ms is None or 1e3 * seconds <= limit_ms


def parse_limits(text: str) -> Limits:
    """`ttft:500,tpot:50,e2el:5000`, any of them, in milliseconds."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise RequestError(f"--goodput knows ttft, tpot and e2el, as in ttft:500,tpot:50; not {part!r}")
        if name in limits:
            raise RequestError(f"--goodput has {name} twice")
        try:
            limits[name] = float(number)
        except ValueError:
            limits[name] = math.nan
        if not (math.isfinite(limits[name]) and limits[name] > 0):
            raise RequestError(f"--goodput {name} takes milliseconds above 0, not {number!r}")
    return Limits(**limits)
