"""Expected speed-up of speculation from acceptance, drafting cost and pass cost (formulas: docs/theory.md)."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from foreword.bench.skeleton import check_least, read_output
from foreword.errors import RequestError

STEP_COMMAND = "foreword bench step --json"
_HALVINGS = 60  # bisection steps for the break-even acceptance: full float precision


@dataclass(frozen=True)
class RelativeStepCurve:
    """Time of a target pass by new tokens, relative to one token."""

    points: tuple[tuple[int, float], ...] = ()  # (n, t(n) / t(1)) by n, from 1; empty: t(n) = t(1)

    def ratio(self, n: int) -> float:
        """Return t(n) / t(1), interpolated; raise `RequestError` beyond the last point."""
        if not self.points:
            return 1.0
        most = self.points[-1][0]
        if n > most:
            raise RequestError(
                f"the step costs end at {most} new tokens and {n - 1} draft tokens need {n}; "
                f"measure further (foreword bench step --tokens 1,..,{n} --json) or lower --k"
            )
        index = bisect_left(self.points, n, key=itemgetter(0))
        size, ratio = self.points[index]
        if size == n:
            return ratio
        smaller, lower = self.points[index - 1]
        return lower + (ratio - lower) * (n - smaller) / (size - smaller)


FLAT = RelativeStepCurve()
"""Assumption of the closed form: a pass over a few tokens costs as much as over one."""


@dataclass(frozen=True)
class DraftingCost:
    """Cost of drafting; the defaults are those of a chain on the target's machine."""

    level_cost: float  # per level, in plain passes
    network_cost: float = 0.0  # round trip per draft, in plain passes
    width: int = 1  # alternatives per level; only the likeliest is continued


@dataclass(frozen=True)
class Prediction:
    """Prediction for drafts of k levels."""

    k: int
    nodes: int  # draft tokens
    tokens_per_pass: float
    cost: float  # of a pass and its draft, in plain passes
    speedup: float  # tokens per pass / cost
    break_even: float | None  # acceptance at which the speed-up is 1; None: below 1 even if all are accepted


def expected_tokens(alpha: float, k: int, width: int = 1) -> float:
    """Return the expected tokens of a pass with k levels of `width` alternatives each, the target's own included.

    A draft reaches level i with probability alpha**(i - 1). There, one of `width` tokens is right with probability
    1 - (1 - alpha)**width. For chains the sum is (1 - alpha**(k + 1)) / (1 - alpha), added term by term for alpha = 1.
    """
    hit = alpha if width == 1 else 1 - (1 - alpha) ** width
    return 1 + hit * math.fsum(alpha**level for level in range(k))


def pass_cost(k: int, drafting: DraftingCost, curve: RelativeStepCurve = FLAT) -> float:
    """Return the time of drafting and verifying k levels, in plain passes."""
    return k * drafting.level_cost + drafting.network_cost + curve.ratio(k * drafting.width + 1)


def break_even(k: int, cost: float, width: int = 1) -> float | None:
    """Return the acceptance at which the expected tokens equal the cost; None if they never do."""
    if cost <= expected_tokens(0.0, k, width):
        return 0.0
    if cost > expected_tokens(1.0, k, width):
        return None
    too_low, enough = 0.0, 1.0  # the expected tokens rise with the acceptance
    for _ in range(_HALVINGS):
        middle = (too_low + enough) / 2
        if expected_tokens(middle, k, width) >= cost:
            enough = middle
        else:
            too_low = middle
    return enough


def predict(
    alpha: float, drafting: DraftingCost, depths: Sequence[int], curve: RelativeStepCurve = FLAT
) -> list[Prediction]:
    """Return one prediction per number of levels."""
    if not 0 <= alpha <= 1:
        raise RequestError(f"--alpha must be in 0 .. 1, not {alpha}")
    for option, cost in (("--draft-cost", drafting.level_cost), ("--network-cost", drafting.network_cost)):
        if not 0 <= cost < math.inf:
            raise RequestError(f"{option} must be 0 or more, in target passes, not {cost}")
    check_least(1, tree_width=drafting.width)
    if not depths or min(depths) < 1:
        raise RequestError("--k needs numbers of draft tokens, each at least 1")
    return [_predict_one(alpha, drafting, k, curve) for k in depths]


def _predict_one(alpha: float, drafting: DraftingCost, k: int, curve: RelativeStepCurve) -> Prediction:
    width = drafting.width
    tokens, cost = expected_tokens(alpha, k, width), pass_cost(k, drafting, curve)
    return Prediction(k, k * width, tokens, cost, tokens / cost, break_even(k, cost, width))


def best(predictions: Sequence[Prediction]) -> Prediction:
    """Return the greatest speed-up, and among equal ones the fewest draft tokens."""
    return max(predictions, key=lambda one: (one.speedup, -one.k))


def least_break_even(predictions: Sequence[Prediction]) -> Prediction | None:
    """Return the prediction with the lowest break-even acceptance; None if no number of draft tokens breaks even."""
    reached = [one for one in predictions if one.break_even is not None]
    return min(reached, key=lambda one: (one.break_even, one.k), default=None)


def read_step_costs(path: Path) -> RelativeStepCurve:
    """Read the curve from the output of `foreword bench step --json`."""
    return read_output("--step-costs", path, f"{STEP_COMMAND}` with 1 among its `--tokens", step_curve)


def step_curve(measured: Mapping[str, Any]) -> RelativeStepCurve:
    """Return the curve from the object of `foreword bench step --json`; raise `ValueError` if invalid."""
    times = {int(row["n"]): float(row["ms"]) for row in measured["rows"]}  # milliseconds by new tokens
    if 1 not in times or not all(n >= 1 and 0 < ms < math.inf for n, ms in times.items()):
        raise ValueError("times of passes must be positive, and one must be over one token")
    return RelativeStepCurve(tuple((n, times[n] / times[1]) for n in sorted(times)))
