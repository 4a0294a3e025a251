"""What was seen of a drafter that is being rolled out, and of the requests that do without it."""

import math
from collections import deque
from dataclasses import dataclass, field

MOST_TIMES = 4096
"""Requests of an arm whose times are remembered."""

SURE = 1.645
"""Standard errors: one look in twenty is wrong."""


@dataclass(frozen=True)
class Outcome:
    """How one request of an arm has gone."""

    passes: int
    tokens: int
    ttft: float  # seconds, from arrival
    tpot: float | None  # seconds per token after the first; None: there were none
    cost: float  # its part of the devices' time, in whatever unit prices are in; seconds without any
    preemptions: int = 0
    is_error: bool = False


@dataclass
class Mean:
    """A weighted mean and how sure it is."""

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
        """Standard error; infinite while there is one value."""
        effective = self.weight**2 / self._squared_weights if self._squared_weights else 0.0
        return math.sqrt(self._square / self.weight / (effective - 1)) if effective > 1 else math.inf


@dataclass
class TrialArm:
    """Requests with the drafter, or those without it, in the same minutes."""

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
    """Whether so many, or more, events are a surprise where `expected` was the mean (Poisson)."""
    if not count:
        return False
    term = below = math.exp(-expected)
    for number in range(1, count):
        term *= expected / number
        below += term
    return 1 - below < chance


def quantile_bounds(values: "deque[float]", share: float = 0.95) -> tuple[float, float] | None:
    """Between which values the quantile lies (order statistics); None while there are too few to say."""
    count = len(values)
    spread = SURE * math.sqrt(count * share * (1 - share))
    low, high = math.floor(count * share - spread), math.ceil(count * share + spread)
    if low < 1 or high > count - 1:
        return None
    ordered = sorted(values)
    return ordered[low - 1], ordered[high]
