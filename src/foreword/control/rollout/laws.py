"""Whether answers that are drawn with a drafter have the distribution of those that are drawn without it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

BUCKETS = 8
"""Token ids are counted by their remainder: a drafter that changes which tokens come changes some of the counts."""

NAMES = (
    "length",
    "log probability of a token",
    "share of likeliest tokens",
    "repeated tokens",
    *(f"share of token ids {bucket} of {BUCKETS}" for bucket in range(BUCKETS)),
)

LEAST_PAIRS = 20
"""Pairs of answers before anything is concluded."""

SURE_AT_ONCE, SURE_AT_END = 5.0, 3.5
"""Standard errors: after every pair, and when all are there. For all figures together and all looks the wrong alarms
are below 1%; 3.5 once is 5 in 10,000 for each figure."""

Figures = tuple[float, ...]
"""Of one answer, in the order of `NAMES`. Whatever is computed from a text has the same mean under the same law."""


def figures_of(tokens: Sequence[int], logprobs: Sequence[float], ranks: Sequence[int]) -> Figures:
    """`logprobs` and `ranks` are those of the tokens, by the target alone."""
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
class LawComparison:
    """Figures of answers to the same requests with and without a drafter, drawn with different seeds.

    Tokens of one answer depend on each other, answers do not: so the differences of whole answers are what is
    compared with zero.
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
        """In what the laws differ beyond doubt; `is_last`: no further pair will come."""
        if self.pairs < LEAST_PAIRS:
            return None
        errors = [self._errors(place) for place in range(len(NAMES))]
        place = max(range(len(NAMES)), key=lambda place: abs(errors[place]))
        sure = SURE_AT_END if is_last else SURE_AT_ONCE
        if abs(errors[place]) <= sure * (1 + (sure * sure + 1) / (4 * self.pairs)):  # as of a t distribution
            return None
        mean = self._sums[place] / self.pairs
        return f"law: {NAMES[place]} differs by {mean:+.3g}, {abs(errors[place]):.1f} standard errors"

    def _errors(self, place: int) -> float:
        """By how many standard errors the mean difference is not zero."""
        mean = self._sums[place] / self.pairs
        variance = self._squares[place] / self.pairs - mean * mean
        if variance <= 1e-12 * max(mean * mean, 1e-12):  # always the same difference
            return 0.0 if abs(mean) < 1e-9 else math.copysign(math.inf, mean)
        return mean / math.sqrt(variance / (self.pairs - 1))

    def as_json(self) -> dict[str, Any]:
        return {"pairs": self.pairs, "sums": self._sums, "squares": self._squares}

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> "LawComparison":
        """What `as_json` has written; raises `ValueError` for anything else."""
        found = LawComparison(
            int(saved["pairs"]), *([float(number) for number in saved[name]] for name in ("sums", "squares"))
        )
        is_whole = len(found._sums) == len(found._squares) == len(NAMES)
        if found.pairs < 0 or not is_whole or not all(map(math.isfinite, (*found._sums, *found._squares))):
            raise ValueError("no comparison of laws")
        return found
