"""Fitted call time of a drafter by draft levels, requests and tokens to catch up."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foreword.speculation.measured.settings import COSTS

PARTS = 5
"""Cost terms: per call, per level, per level and request, per request, per token to catch up."""

PRIOR = np.array([1.0, 1.0, 1.0, 0.25, 0.005])
"""Relative prior standard deviation of each term. Until calls vary, most of their time is attributed to levels."""

NOISE, DRIFT = 0.01, 0.002
"""Relative variance of one call's time; fraction of the uncertainty that returns per call: about ten calls count."""

MOST_SAVED, MOST_NUMBER = 50, 1e9
"""Pseudo-count limit of restored calls, and the largest number accepted in a saved file."""

_HALF = np.tril_indices(PARTS)


class CallCost:
    """Expected seconds = parts · (1, levels, levels · requests, requests, lag), fitted by recursive least squares.

    Forgetting widens the uncertainty but keeps the mean, so that calls of equal shape do not change the slopes. The
    first call is ignored because it fills caches.
    """

    def __init__(self) -> None:
        self._is_warm = False
        self._seen = 0
        self._levels = (0, 0)  # smallest and largest number of levels observed
        self._usual = 1  # requests in the first call
        self._parts: list[float] = [0.0] * PARTS  # seconds
        self._spread: NDArray[np.float64] | None = None  # covariance matrix of the parts

    def observe(self, levels: int, seconds: float, requests: int = 1, lag: int = 0) -> None:
        """Learn from a call for `requests` requests; `lag` tokens were committed since the drafter's previous call."""
        if not self._is_warm:
            self._is_warm = True
            return
        terms = (1.0, levels, levels * requests, requests, lag)
        expected, x = _dot(self._parts, terms), np.array(terms)
        if self._seen >= 2 * COSTS.few_calls:  # clip outliers, such as a pause
            seconds = min(seconds, COSTS.farthest * max(expected, 1e-9))
        self._seen += 1
        fewest, most = self._levels
        self._levels = min(fewest or levels, levels), max(most, levels)
        self._usual = requests if self._spread is None else self._usual
        one_request = self._usual
        prior = PRIOR / (1, 1, one_request, one_request, 1)
        own = self.seconds(levels, requests) or seconds  # expected time without the lag
        widest = max(own, 1e-9) ** 2 / np.square(prior[:-1] * x[:-1]).sum() * np.diag(prior**2)
        spread = widest if self._spread is None else self._spread
        toward = spread @ x
        whole = toward @ x + NOISE * max(seconds, expected, 1e-9) ** 2
        parts = self._parts + toward * ((seconds - expected) / whole)
        self._spread = (1 - DRIFT) * (spread - np.outer(toward, toward) / whole) + DRIFT * widest
        for _ in range(PARTS):  # the most likely parts of which none is negative
            least = parts.argmin()
            if parts[least] >= 0:
                break
            parts -= self._spread[least] * (min(parts[least], 0.0) / self._spread[least, least])
        self._parts = np.maximum(parts, 0.0).tolist()

    @property
    def is_known(self) -> bool:
        """Whether calls of different depths were measured, or enough calls of one depth."""
        has_changed = self._levels[0] < self._levels[1]
        return self._seen >= COSTS.few_calls and (has_changed or self._seen > 2 * COSTS.few_calls)

    @property
    def lag_seconds(self) -> float:
        """Expected seconds per token that the drafter has to catch up."""
        return self._parts[4]

    def seconds(self, levels: float, requests: int = 1) -> float:
        """Return the expected seconds of a call without lag; 0 before the first measurement."""
        return _dot(self._parts, (1.0, levels, levels * requests, requests, 0.0))

    def as_json(self, slower: float = 1.0) -> list[float]:
        """Return numbers that `from_json` reads, scaled to a machine that is `slower` times as slow."""
        spread = [] if self._spread is None else (slower**2 * self._spread[_HALF]).tolist()
        parts = [slower * part for part in self._parts]
        return [min(self._seen, MOST_SAVED), *self._levels, self._usual, *parts, *spread]

    @staticmethod
    def from_json(saved: Sequence[float]) -> "CallCost":
        """Restore what `as_json` returned; raise `ValueError` for anything else."""
        numbers = [float(number) for number in saved]
        if len(numbers) not in (4 + PARTS, 4 + PARTS + len(_HALF[0])):
            raise ValueError("saved call costs have the wrong length")
        if not all(abs(number) < MOST_NUMBER for number in numbers) or min(numbers[: 4 + PARTS]) < 0:
            raise ValueError("saved call costs are out of range")
        cost, spread = CallCost(), numbers[4 + PARTS :]
        cost._seen, cost._levels = int(numbers[0]), (int(numbers[1]), int(numbers[2]))
        cost._usual, cost._parts = max(int(numbers[3]), 1), numbers[4 : 4 + PARTS]
        if spread:
            cost._spread = np.zeros((PARTS, PARTS))
            cost._spread[_HALF] = cost._spread.T[_HALF] = spread
        return cost


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum([a * b for a, b in zip(one, other, strict=True)])
