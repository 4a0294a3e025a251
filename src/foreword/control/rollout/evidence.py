"""Evidence about a drafter in a roll-out: measurements of requests with it and without it."""

import math
from collections import deque
from dataclasses import dataclass, field

MOST_TIMES = 4096
"""Requests per arm whose times are kept."""

Z_5_PERCENT = 1.645
"""Limit of a one-sided 5% test, in standard errors."""


@dataclass(frozen=True)
class Outcome:
    """Result of one request of an arm."""

    passes: int
    tokens: int
    ttft: float  # seconds, from arrival
    tpot: float | None  # seconds per token after the first; None: there were none
    cost: float  # its share of device time, times the device's price; without prices in seconds
    preemptions: int = 0
    is_error: bool = False


@dataclass
class Mean:
    """A weighted mean with its standard error."""

    weight: float = 0.0
    mean: float = 0.0
    _square: float = 0.0
    _squared_weights: float = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        self.weight += weight
        self._squared_weights += weight * weight
        off = value - self.mean
        self.mean += off * weight / self.weight
        self._square += weight * off * (value - self.mean)

    @property
    def error(self) -> float:
        """Standard error; infinite with one value."""
        effective = self.weight**2 / self._squared_weights if self._squared_weights else 0.0
        return math.sqrt(self._square / self.weight / (effective - 1)) if effective > 1 else math.inf


@dataclass
class TrialArm:
    """Totals of one arm of a trial: the requests with the drafter, or those without it in the same period."""

    requests: int = 0
    passes: int = 0
    tokens: int = 0
    errors: int = 0
    preemptions: int = 0
    tpot: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_TIMES))
    ttft: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_TIMES))
    cost_per_token: Mean = field(default_factory=Mean)

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
    """Whether at least `count` events are improbable under a Poisson mean of `expected`."""
    if not count:
        return False
    term = below = math.exp(-expected)
    for number in range(1, count):
        term *= expected / number
        below += term
    return 1 - below < chance


def quantile_bounds(values: "deque[float]", share: float = 0.95) -> tuple[float, float] | None:
    """Return bounds of the quantile from order statistics; None with too few values."""
    count = len(values)
    spread = Z_5_PERCENT * math.sqrt(count * share * (1 - share))
    low, high = math.floor(count * share - spread), math.ceil(count * share + spread)
    if low < 1 or high > count - 1:
        return None
    ordered = sorted(values)
    return ordered[low - 1], ordered[high]
