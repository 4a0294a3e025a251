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
"""Maximum probability of a false alarm in all checks together; those of the tests below add up to less."""
OWN_LOGPROBS = 4e-5  # sampled tokens compared with the server's log-probabilities
WITHOUT_SPECULATION = 4e-5  # sampled texts compared with those without speculation
COPIES = 1e-5  # equal answers to one request

Floats = NDArray[np.float64]

BETS = np.array([sign * size for size in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0) for sign in (1, -1)])
"""Bets λ that an event is too frequent (positive λ) or too rare (negative), slightly or strongly.

A bet multiplies its stake by e^λ / (1 + p (e^λ - 1)) if an event of probability p happens, otherwise by
1 / (1 + p (e^λ - 1)). With right probabilities its expected gain is 1, so a large gain is evidence against them.
"""

_NORMAL = 1.645  # standard deviations above which a normal number is with the probability 1 - CONFIDENCE


def gains(chances: Floats, happened: NDArray[np.bool_]) -> Floats:
    """Return the log of every bet's gain on every event, [events, bets]; both arguments are [draws, events]."""
    fair = np.stack([np.log1p(chances * np.expm1(bet)).sum(axis=0) for bet in BETS], axis=1)
    log_gains: Floats = happened.sum(axis=0)[:, None] * BETS - fair
    return log_gains


def log_evidence(chances: Floats, happened: NDArray[np.bool_]) -> float:
    """Return the log of the mean gain of all bets on all events."""
    if not chances.size:
        return 0.0
    logs = gains(chances, happened)
    largest = float(logs.max())
    return largest + float(np.log(np.exp(logs - largest).mean()))


def visible_bias(chances: Floats, bets: int, alarm: float) -> float:
    """Return the smallest total variation that would have been detected with `CONFIDENCE`.

    The assumed fault makes the event of probability `chances` [draws] happen with probability b, and samples correctly
    otherwise. One of all `bets` alone must raise the alarm. Its log gain is a sum over draws, approximated as normal.
    """
    if not chances.size:
        return 1.0
    needed = np.log(bets / alarm)

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
    """Return an upper bound of the total variation between the source of `counts` and a known distribution.

    The bound is McDiarmid's and holds with the probability `CONFIDENCE`.
    """
    draws = counts.sum()
    seen = float(np.abs(counts / draws - distribution).sum() / 2)
    spread = float(np.sqrt(np.log(1 / (1 - CONFIDENCE)) / (2 * draws)))
    return min(seen + spread, 1.0)


PREFIXES = (4, 8, None)  # numbers of leading characters that distinguish texts; None: all
MOST_CELLS = 24
LEAST_COUNT = 8  # minimum count over both samples


@dataclass(frozen=True)
class Contrast:
    """The cell (a text, or a prefix of texts) whose frequencies in two samples differ most."""

    cell: str
    counts: tuple[int, int]  # in each sample
    p: float  # p-value over all cells


def contrast(one: Sequence[str], other: Sequence[str]) -> Contrast:
    """Compare two samples of texts, by their first characters and by the whole texts."""
    cells = [
        cell
        for characters in PREFIXES
        for cell in _cells([text[:characters] for text in one], [text[:characters] for text in other])
    ]
    p_values = [fisher(a, b, len(one), len(other)) for _, a, b in cells]
    smallest = min(p_values)
    cell, a, b = cells[p_values.index(smallest)]
    return Contrast(cell, (a, b), min(smallest * len(cells), 1.0))


def _cells(one: Sequence[str], other: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return (text, count, count) of the texts that are most frequent in both samples together, and of all others."""
    left, right = Counter(one), Counter(other)
    pooled = sorted((left + right).items(), key=lambda entry: (-entry[1], entry[0]))
    common = [text for text, count in pooled[:MOST_CELLS] if count >= LEAST_COUNT]
    cells = [(text, left[text], right[text]) for text in common]
    left_others = len(one) - sum(count for _, count, _ in cells)
    right_others = len(other) - sum(count for _, _, count in cells)
    return [*cells, ("all others", left_others, right_others)]


def fisher(a: int, b: int, left: int, right: int) -> float:
    """Return the two-sided p-value of Fisher's exact test: `a` of `left` against `b` of `right`."""
    both, draws = a + b, left + right
    low, high = max(0, both - right), min(both, left)
    log_total = _log_choose(draws, both)

    def chance(k: int) -> float:
        """Return the probability that k of `both` are in the left sample."""
        return exp(_log_choose(left, k) + _log_choose(right, both - k) - log_total)

    below = sum(chance(k) for k in range(low, a + 1))
    above = sum(chance(k) for k in range(a, high + 1))
    return min(1.0, 2 * min(below, above))


def visible_shift(share: float, draws: int, alarm: float) -> float:
    """Return the change of a cell's fraction that `CONFIDENCE` would detect, by normal approximation."""
    normal, cells = NormalDist(), len(PREFIXES) * (MOST_CELLS + 1)
    deviations = normal.inv_cdf(1 - alarm / (2 * cells)) + normal.inv_cdf(CONFIDENCE)
    return min(1.0, deviations * sqrt(2 * share * (1 - share) / draws))


def _log_choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)
