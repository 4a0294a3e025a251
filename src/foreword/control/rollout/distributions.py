"""Tests whether answers sampled with a drafter have the same distribution as without it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

BUCKETS = 8
"""Token ids are counted by their remainder modulo this number. A changed distribution changes some of the counts."""

NAMES = (
    "length",
    "log probability of a token",
    "share of likeliest tokens",
    "repeated tokens",
    *(f"share of token ids {bucket} of {BUCKETS}" for bucket in range(BUCKETS)),
)
"""Names of the figures that describe an answer, for messages."""

LEAST_ANSWER_PAIRS = 20
"""Minimum pairs of answers before a conclusion."""

SIGNIFICANT_ERRORS, SIGNIFICANT_ERRORS_AT_END = 5.0, 3.5
"""Standard errors from which a difference is significant: after each pair of answers, and after the last pair.

The probability of a false alarm over all figures and pairs stays below 1%. For one figure, 3.5 standard errors have
probability 0.0005.
"""

Figures = tuple[float, ...]
"""Figures of one answer, in the order of `NAMES`. If two distributions are equal, the means of all figures are."""


def figures_of(tokens: Sequence[int], logprobs: Sequence[float], ranks: Sequence[int]) -> Figures:
    """Return the figures of an answer; `logprobs` and `ranks` (1: likeliest) of its tokens are the target's."""
    count = max(len(tokens), 1)
    repeats = sum(before == token for before, token in pairwise(tokens))
    bucket_counts = [0] * BUCKETS
    for token in tokens:
        bucket_counts[token % BUCKETS] += 1
    return (
        float(len(tokens)),
        sum(logprobs) / count,
        sum(rank == 1 for rank in ranks) / count,
        repeats / count,
        *(tokens_in_bucket / count for tokens_in_bucket in bucket_counts),
    )


@dataclass
class DistributionComparison:
    """Figures of answers to the same requests with and without a drafter, sampled with different seeds.

    Tokens of one answer depend on each other, but answers are independent: the test compares figures of whole answers.
    """

    answer_pairs: int = 0  # answers without and with the drafter to one request
    # [figures]: sums of the differences, and sums of the squared differences.
    _sums: list[float] = field(default_factory=lambda: [0.0] * len(NAMES))
    _squares: list[float] = field(default_factory=lambda: [0.0] * len(NAMES))

    def add(self, plain: Figures, drafted: Figures) -> None:
        """Add the figures of the answer without the drafter and of the answer with it."""
        self.answer_pairs += 1
        for index, (plain_figure, drafted_figure) in enumerate(zip(plain, drafted, strict=True)):
            difference = drafted_figure - plain_figure
            self._sums[index] += difference
            self._squares[index] += difference * difference

    def difference(self, is_last: bool) -> str | None:
        """Return a description of the most significant difference; None: no difference is significant.

        `is_last`: no further pair follows.
        """
        if self.answer_pairs < LEAST_ANSWER_PAIRS:
            return None
        errors = [self._errors(index) for index in range(len(NAMES))]
        index = max(range(len(NAMES)), key=lambda index: abs(errors[index]))
        limit = SIGNIFICANT_ERRORS_AT_END if is_last else SIGNIFICANT_ERRORS
        # For few pairs the limit is higher: this expands the quantile of a t distribution around the normal one.
        limit *= 1 + (limit * limit + 1) / (4 * self.answer_pairs)
        if abs(errors[index]) <= limit:
            return None
        mean = self._sums[index] / self.answer_pairs
        return (
            f"distribution: {NAMES[index]} differs by {mean:+.3g}, {abs(errors[index]):.1f} standard errors"
        )

    def _errors(self, index: int) -> float:
        """Return the mean difference of a figure, in standard errors."""
        mean = self._sums[index] / self.answer_pairs
        variance = self._squares[index] / self.answer_pairs - mean * mean
        if variance <= 1e-12 * max(mean * mean, 1e-12):  # the difference is constant, up to rounding
            return 0.0 if abs(mean) < 1e-9 else math.copysign(math.inf, mean)
        return mean / math.sqrt(variance / (self.answer_pairs - 1))

    def as_json(self) -> dict[str, Any]:
        return {"pairs": self.answer_pairs, "sums": self._sums, "squares": self._squares}

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> "DistributionComparison":
        """Restore what `as_json` returned; raise `ValueError` for anything else."""
        answer_pairs = int(saved["pairs"])
        sums, squares = (
            [float(number) for number in saved["sums"]],
            [float(number) for number in saved["squares"]],
        )
        is_complete = len(sums) == len(squares) == len(NAMES) and all(map(math.isfinite, sums + squares))
        if answer_pairs < 0 or not is_complete:
            raise ValueError("the saved comparison of distributions is invalid")
        return DistributionComparison(answer_pairs, sums, squares)
