"""Statistical tests of sampled tokens, with a bound on false alarms.

Most checks compare texts that must be equal, so that chance cannot refute a correct server. For the checks that sample,
the probabilities of a false alarm add up to the total one (Bonferroni).
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
"""Maximum probability of a false alarm of all checks together, of which each test below takes a share."""
OWN_LOGPROBS = 4e-5  # sampled tokens compared with the server's log-probabilities
WITHOUT_SPECULATION = 4e-5  # sampled texts compared with those without speculation
COPIES = 1e-5  # equal answers to one request

Floats = NDArray[np.float64]

BETS = np.array([sign * size for size in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0) for sign in (1, -1)])
"""Bets λ that an event is too frequent (positive) or too rare, slightly or strongly."""

_NORMAL = 1.645  # standard deviations of CONFIDENCE, one-sided


def gains(chances: Floats, happened: NDArray[np.bool_]) -> Floats:
    """Return the log gain of every bet on every event [events, bets]; both arguments are [draws, events]."""
    fair = np.stack([np.log1p(chances * np.expm1(bet)).sum(axis=0) for bet in BETS], axis=1)
    won: Floats = happened.sum(axis=0)[:, None] * BETS - fair
    return won


def log_evidence(chances: Floats, happened: NDArray[np.bool_]) -> float:
    """Return the log of the mean gain of all bets."""
    if not chances.size:
        return 0.0
    logs = gains(chances, happened)
    top = float(logs.max())
    return top + float(np.log(np.exp(logs - top).mean()))


def visible_bias(chances: Floats, gamblers: int, alarm: float) -> float:
    """Return the smallest total variation that would have been detected with `CONFIDENCE`.

    The assumed fault forces the event with probability b and samples correctly otherwise. One of the bets alone
    (`gamblers` in all) must raise the alarm. Its log gain is a sum over draws, approximated as normal.
    """
    if not chances.size:
        return 1.0
    needed = np.log(gamblers / alarm)

    def is_seen(bias: float) -> bool:
        biased = chances + bias * (1 - chances)
        spread = np.sqrt((biased * (1 - biased)).sum())
        return any(
            (biased * bet - np.log1p(chances * np.expm1(bet))).sum() - _NORMAL * bet * spread >= needed
            for bet in BETS[BETS > 0]
        )

    low, high = 0.0, 1.0
    if not is_seen(high):
        return 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if is_seen(middle) else (middle, high)
    return float(high * (1 - chances).mean())


def most_distance(counts: Floats, distribution: Floats) -> float:
    """Return an upper bound of the total variation between the sampled distribution and a known one (McDiarmid)."""
    draws = counts.sum()
    seen = float(np.abs(counts / draws - distribution).sum() / 2)
    spread = float(np.sqrt(np.log(1 / (1 - CONFIDENCE)) / (2 * draws)))
    return min(seen + spread, 1.0)


PREFIXES = (4, 8, None)  # numbers of leading characters that distinguish texts; None: all
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
    """Return the counts of the most frequent texts of both samples together, and of all other texts."""
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
    """Return the change of a cell's fraction that would be detected with `CONFIDENCE`, in normal approximation."""
    normal = NormalDist()
    deviations = normal.inv_cdf(1 - alarm / (2 * len(PREFIXES) * (MOST_CELLS + 1))) + normal.inv_cdf(
        CONFIDENCE
    )
    return min(1.0, deviations * sqrt(2 * share * (1 - share) / draws))


def _log_choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)
