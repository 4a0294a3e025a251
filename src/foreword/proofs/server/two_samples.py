"""Draws of two servers that should have one law, which is not known.

Of what both drew together, each cell's share in the first sample is hypergeometric, whatever the law: that is Fisher's
exact test. Cells are chosen by what was drawn in all, which does not spoil it; Bonferroni over the cells.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, lgamma, sqrt
from statistics import NormalDist

from foreword.proofs.server.verdict import CONFIDENCE

PREFIXES = (4, 8, None)
"""Characters by which texts are told apart: the first, some more, all."""
MOST_CELLS = 24
LEAST_COUNT = 8  # of a text in both samples: rarer ones can show nothing


@dataclass(frozen=True)
class Contrast:
    """The cell in which two samples differ most."""

    cell: str
    counts: tuple[int, int]
    p: float  # of a difference as large anywhere, if there is none


def contrast(one: Sequence[str], other: Sequence[str]) -> Contrast:
    """Compare two samples of texts, by their first characters and whole."""
    found = [
        (*cell, fisher(cell[1], cell[2], len(one), len(other)))
        for characters in PREFIXES
        for cell in _cells([text[:characters] for text in one], [text[:characters] for text in other])
    ]
    cell, a, b, p = min(found, key=lambda entry: entry[3])
    return Contrast(cell, (a, b), min(p * len(found), 1.0))


def _cells(one: Sequence[str], other: Sequence[str]) -> list[tuple[str, int, int]]:
    """Texts that are common enough in both samples together, and all others; which sample had them plays no part."""
    left, right = Counter(one), Counter(other)
    pooled = sorted((left + right).items(), key=lambda entry: (-entry[1], entry[0]))
    common = [cell for cell, count in pooled[:MOST_CELLS] if count >= LEAST_COUNT]
    found = [(cell, left[cell], right[cell]) for cell in common]
    rest = len(one) - sum(c[1] for c in found), len(other) - sum(c[2] for c in found)
    return [*found, ("all others", *rest)]


def fisher(a: int, b: int, left: int, right: int) -> float:
    """Two-sided chance of a split at least as uneven as `a` of `left` against `b` of `right`."""
    both, draws = a + b, left + right
    low, high = max(0, both - right), min(both, left)
    whole = _log_choose(draws, both)

    def chance(k: int) -> float:
        return exp(_log_choose(left, k) + _log_choose(right, both - k) - whole)

    below = sum(chance(k) for k in range(low, a + 1))
    above = sum(chance(k) for k in range(a, high + 1))
    return min(1.0, 2 * min(below, above))


def visible_shift(share: float, draws: int, alarm: float) -> float:
    """By how much a cell of this share would have had to differ to be seen with `CONFIDENCE`, by the normal law."""
    normal = NormalDist()
    deviations = normal.inv_cdf(1 - alarm / (2 * len(PREFIXES) * (MOST_CELLS + 1))) + normal.inv_cdf(
        CONFIDENCE
    )
    return min(1.0, deviations * sqrt(2 * share * (1 - share) / draws))


def _log_choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)
