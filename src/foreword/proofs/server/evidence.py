"""Statistical tests of draws, with a bound on false alarms.

Most checks compare texts that must be equal, so that chance cannot refute a correct server. The others sample; their
error shares add up to the total probability of a false alarm (Bonferroni).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, lgamma, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from foreword.proofs.server.context import CONFIDENCE

FAMILY = 1e-4
OWN_LOGPROBS = 4e-5  # draws against the server's log-probabilities
WITHOUT_SPECULATION = 4e-5  # draws against draws without speculation
COPIES = 1e-5  # answers of one request that are equal by chance


Floats = NDArray[np.float64]

BETS = np.array([sign * size for size in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0) for sign in (1, -1)])
"""λ of each gambler: the event is too frequent or too rare, slightly or strongly."""

_NORMAL = 1.645  # one-sided standard deviations of CONFIDENCE


def gains(chances: Floats, happened: NDArray[np.bool_]) -> Floats:
    """[events, bets], log gain of each gambler; both arguments are [draws, events]."""
    stakes = np.empty((chances.shape[1], len(BETS)))
    for place, bet in enumerate(BETS):
        fair = np.log1p(chances * np.expm1(bet))
        stakes[:, place] = bet * happened.sum(axis=0) - fair.sum(axis=0)
    return stakes


def log_evidence(chances: Floats, happened: NDArray[np.bool_]) -> float:
    """Return the log of all gamblers' total gain per initial unit."""
    if not chances.size:
        return 0.0
    return log_mean(gains(chances, happened))


def log_mean(logs: Floats) -> float:
    top = float(logs.max())
    return top + float(np.log(np.exp(logs - top).mean()))


def visible_bias(chances: Floats, gamblers: int, alarm: float) -> float:
    """Return the smallest total variation that would have been detected with `CONFIDENCE`.

    The assumed fault forces the event with probability b and samples correctly otherwise. The gamblers' logs are sums
    over draws, approximated as normal; one gambler alone must raise the alarm.
    """
    if not chances.size:
        return 1.0
    needed = np.log(gamblers / alarm)

    def is_seen(bias: float) -> bool:
        biased = chances + bias * (1 - chances)
        for bet in BETS[BETS > 0]:
            mean = (biased * bet - np.log1p(chances * np.expm1(bet))).sum()
            spread = bet * np.sqrt((biased * (1 - biased)).sum())
            if mean - _NORMAL * spread >= needed:
                return True
        return False

    low, high = 0.0, 1.0
    if not is_seen(high):
        return 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if is_seen(middle) else (middle, high)
    return float(high * (1 - chances).mean())


@dataclass(frozen=True)
class Distance:
    """Total variation between a known distribution and samples."""

    seen: float  # between the distribution and sample fractions
    upper: float  # upper confidence bound of the true distance (McDiarmid)


def distance(counts: Floats, law: Floats) -> Distance:
    """Return the distance at one position from counts and probabilities of the same cells."""
    draws = counts.sum()
    seen = float(np.abs(counts / draws - law).sum() / 2)
    spread = float(np.sqrt(np.log(1 / (1 - CONFIDENCE)) / (2 * draws)))
    return Distance(seen, min(seen + spread, 1.0))


PREFIXES = (4, 8, None)
"""Numbers of leading characters that distinguish texts; None: all."""
MOST_CELLS = 24
LEAST_COUNT = 8  # minimum count over both samples


@dataclass(frozen=True)
class Contrast:
    """The cell with the largest difference between two samples."""

    cell: str
    counts: tuple[int, int]
    p: float  # p-value over all cells


def contrast(one: Sequence[str], other: Sequence[str]) -> Contrast:
    """Compare two samples of texts, by first characters and whole."""
    found = [
        (*cell, fisher(cell[1], cell[2], len(one), len(other)))
        for characters in PREFIXES
        for cell in _cells([text[:characters] for text in one], [text[:characters] for text in other])
    ]
    cell, a, b, p = min(found, key=lambda entry: entry[3])
    return Contrast(cell, (a, b), min(p * len(found), 1.0))


def _cells(one: Sequence[str], other: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return frequent texts of the joint sample, and the rest, independent of which sample has them."""
    left, right = Counter(one), Counter(other)
    pooled = sorted((left + right).items(), key=lambda entry: (-entry[1], entry[0]))
    common = [cell for cell, count in pooled[:MOST_CELLS] if count >= LEAST_COUNT]
    found = [(cell, left[cell], right[cell]) for cell in common]
    rest = len(one) - sum(c[1] for c in found), len(other) - sum(c[2] for c in found)
    return [*found, ("all others", *rest)]


def fisher(a: int, b: int, left: int, right: int) -> float:
    """Return the two-sided p-value of `a` of `left` against `b` of `right`."""
    both, draws = a + b, left + right
    low, high = max(0, both - right), min(both, left)
    whole = _log_choose(draws, both)

    def chance(k: int) -> float:
        return exp(_log_choose(left, k) + _log_choose(right, both - k) - whole)

    below = sum(chance(k) for k in range(low, a + 1))
    above = sum(chance(k) for k in range(a, high + 1))
    return min(1.0, 2 * min(below, above))


def visible_shift(share: float, draws: int, alarm: float) -> float:
    """Return the difference of a cell's fraction that would be detected with `CONFIDENCE`, in normal approximation."""
    normal = NormalDist()
    deviations = normal.inv_cdf(1 - alarm / (2 * len(PREFIXES) * (MOST_CELLS + 1))) + normal.inv_cdf(
        CONFIDENCE
    )
    return min(1.0, deviations * sqrt(2 * share * (1 - share) / draws))


def _log_choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)
