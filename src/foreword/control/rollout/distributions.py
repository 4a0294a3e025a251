"""Tests whether answers sampled with a drafter have the same distribution as without it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

BUCKETS = 8
"""Token ids are counted by remainder: a changed distribution changes some of the counts."""

NAMES = (
    "length",
    "log probability of a token",
    "share of likeliest tokens",
    "repeated tokens",
    *(f"share of token ids {bucket} of {BUCKETS}" for bucket in range(BUCKETS)),
)

LEAST_PAIRS = 20
"""Minimum pairs of answers before a conclusion."""

SURE_AT_ONCE, SURE_AT_END = 5.0, 3.5
"""Standard errors after every pair, and after the last.

Over all figures and tests, false alarms stay below 1%; 3.5 is 5 in 10,000 for each figure.
"""

Figures = tuple[float, ...]
"""Figures of one answer, in the order of `NAMES`. Equal distributions imply equal means of each."""


def figures_of(tokens: Sequence[int], logprobs: Sequence[float], ranks: Sequence[int]) -> Figures:
    """Return the figures of an answer; `logprobs` and `ranks` are the target's."""
    count = max(len(tokens), 1)
    repeats = sum(one == other for one, other in pairwise(tokens))
    shares = [0] * BUCKETS
    for token in tokens:
        shares[token % BUCKETS] += 1
    return (
        float(len(tokens)),
        sum(logprobs) / count,
        sum(rank == 1 for rank in ranks) / count,
        repeats / count,
        *(share / count for share in shares),
    )


@dataclass
class DistributionComparison:
    """Figures of answers to the same requests with and without a drafter, sampled with different seeds.

    Tokens within an answer are dependent, answers are not. So the differences of whole answers are tested.
    """

    pairs: int = 0
    _sums: list[float] = field(default_factory=lambda: [0.0] * len(NAMES))
    _squares: list[float] = field(default_factory=lambda: [0.0] * len(NAMES))

    def add(self, plain: Figures, own: Figures) -> None:
        self.pairs += 1
        for place, (without, having) in enumerate(zip(plain, own, strict=True)):
            off = having - without
            self._sums[place] += off
            self._squares[place] += off * off

    def difference(self, is_last: bool) -> str | None:
        """Return the significant difference of the distributions, if any; `is_last`: no further pair follows."""
        if self.pairs < LEAST_PAIRS:
            return None
        errors = [self._errors(place) for place in range(len(NAMES))]
        place = max(range(len(NAMES)), key=lambda place: abs(errors[place]))
        sure = SURE_AT_END if is_last else SURE_AT_ONCE
        if abs(errors[place]) <= sure * (1 + (sure * sure + 1) / (4 * self.pairs)):  # as for a t distribution
            return None
        mean = self._sums[place] / self.pairs
        return (
            f"distribution: {NAMES[place]} differs by {mean:+.3g}, {abs(errors[place]):.1f} standard errors"
        )

    def _errors(self, place: int) -> float:
        """Return the mean difference in standard errors."""
        mean = self._sums[place] / self.pairs
        variance = self._squares[place] / self.pairs - mean * mean
        if variance <= 1e-12 * max(mean * mean, 1e-12):  # a constant difference
            return 0.0 if abs(mean) < 1e-9 else math.copysign(math.inf, mean)
        return mean / math.sqrt(variance / (self.pairs - 1))

    def as_json(self) -> dict[str, Any]:
        return {"pairs": self.pairs, "sums": self._sums, "squares": self._squares}

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> "DistributionComparison":
        """Restore what `as_json` returned; raise `ValueError` for anything else."""
        found = DistributionComparison(
            int(saved["pairs"]), *([float(number) for number in saved[name]] for name in ("sums", "squares"))
        )
        is_whole = len(found._sums) == len(found._squares) == len(NAMES)
        if found.pairs < 0 or not is_whole or not all(map(math.isfinite, (*found._sums, *found._squares))):
            raise ValueError("saved comparison cannot be read")
        return found
