"""Evidence about a drafter in a roll-out: measurements of requests with the drafter and without it."""

import math
from collections import deque
from dataclasses import dataclass, field

MOST_TIMES = 4096
"""Number of latest requests per arm whose times are stored."""

Z_5_PERCENT = 1.645
"""Quantile of the normal distribution for a one-sided test at 5%."""


@dataclass(frozen=True)
class Outcome:
    """Result of one request of an arm."""

    passes: int
    tokens: int
    ttft: float  # seconds from arrival to the first token
    tpot: float | None  # seconds per token after the first; None: the answer has fewer than two tokens
    cost: float  # the request's device seconds, multiplied by the device's price if prices are set
    preemptions: int = 0
    is_error: bool = False


@dataclass
class Mean:
    """A weighted mean with its standard error."""

    weight: float = 0.0
    mean: float = 0.0
    _square: float = 0.0  # weighted sum of squared deviations from the mean
    _squared_weights: float = 0.0  # sum of squared weights

    def add(self, value: float, weight: float = 1.0) -> None:
        """Add a value to the mean (Welford's algorithm)."""
        self.weight += weight
        self._squared_weights += weight * weight
        deviation = value - self.mean
        self.mean += deviation * weight / self.weight
        self._square += weight * deviation * (value - self.mean)

    @property
    def error(self) -> float:
        """Standard error; infinite with fewer than two values."""
        if not self._squared_weights:
            return math.inf
        values = self.weight**2 / self._squared_weights  # effective number of values with equal weights
        return math.sqrt(self._square / self.weight / (values - 1)) if values > 1 else math.inf


@dataclass
class TrialArm:
    """Totals of one arm of a canary: all requests with the drafter, or all without it in the same period."""

    requests: int = 0
    passes: int = 0
    tokens: int = 0
    errors: int = 0
    preemptions: int = 0
    # Seconds of the latest requests, as in `Outcome`.
    tpot: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_TIMES))
    ttft: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_TIMES))
    cost_per_token: Mean = field(default_factory=Mean)  # weighted by tokens

    def add(self, outcome: Outcome) -> None:
        self.requests += 1
        self.passes += outcome.passes
        self.tokens += outcome.tokens
        self.errors += outcome.is_error
        self.preemptions += outcome.preemptions
        self.ttft.append(outcome.ttft)
        if outcome.tpot is not None:
            self.tpot.append(outcome.tpot)
        if outcome.tokens:
            self.cost_per_token.add(outcome.cost / outcome.tokens, outcome.tokens)


def is_improbable(count: int, expected: float, chance: float = 0.05) -> bool:
    """Whether a Poisson variable with mean `expected` is at least `count` with probability below `chance`."""
    if not count:
        return False
    term = below = math.exp(-expected)  # probabilities of 0 events, and of fewer than `count`
    for number in range(1, count):
        term *= expected / number
        below += term
    return 1 - below < chance


def quantile_bounds(values: "deque[float]", share: float = 0.95) -> tuple[float, float] | None:
    """Return 90% confidence bounds of a quantile from order statistics; None with too few values."""
    count = len(values)
    # The number of values below the quantile is binomial; these are its bounds by the normal approximation.
    spread = Z_5_PERCENT * math.sqrt(count * share * (1 - share))
    low, high = math.floor(count * share - spread), math.ceil(count * share + spread)
    if low < 1 or high > count - 1:
        return None
    ordered = sorted(values)
    return ordered[low - 1], ordered[high]  # the low-th smallest value, and the one after the high-th
