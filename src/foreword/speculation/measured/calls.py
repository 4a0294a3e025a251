"""The time of a drafter's calls by levels, requests and tokens that it lags by."""

from collections.abc import Sequence

from foreword.speculation.measured.settings import COSTS

PARTS = 5
"""Parts of the cost: a call, a level, a level of one request, a request, a token that the drafter lags by."""

PRIOR = (1.0, 1.0, 1.0, 0.25, 0.005)
"""Standard deviations of the parts before anything was measured, relative to each other: until levels or requests have
changed most of a call is taken to be its levels, and half of these to grow with the requests."""

NOISE, DRIFT = 0.01, 0.002
"""Variance of a call's time, and what is forgotten with each call, relative to the time and to the prior: about ten
calls count."""

MOST_SAVED, MOST_NUMBER = 50, 1e9
"""Calls that saved ones count as at most, and a bound on saved numbers."""


class CallCost:
    """Expected seconds = parts · (1, levels, levels · requests, requests, lag), fitted by recursive least squares.

    What is forgotten is replaced by the prior's uncertainty, not by its mean: calls like all others say nothing of the
    slopes, and leave them. The first call is ignored: it fills caches.
    """

    def __init__(self) -> None:
        self._is_warm = False
        self._seen = 0
        self._levels = (0, 0)  # the fewest and the most that were called for
        self._usual = 1  # requests of the first call
        self._parts = [0.0] * PARTS  # seconds
        self._spread: list[list[float]] = []  # covariances of the parts

    def observe(self, levels: int, seconds: float, requests: int = 1, lag: int = 0) -> None:
        """Learn from a call for `requests` requests; `lag` tokens came since the drafter was last called."""
        if not self._is_warm:
            self._is_warm = True
            return
        x = (1.0, levels, levels * requests, requests, lag)
        expected = _dot(self._parts, x)
        if self._seen >= 2 * COSTS.few_calls:  # one pause is no change
            seconds = min(seconds, COSTS.farthest * max(expected, 1e-9))
        self._seen += 1
        fewest, most = self._levels
        self._levels = min(fewest or levels, levels), max(most, levels)
        self._usual = self._usual if self._spread else requests
        prior = [one / self._usual if part in (2, 3) else one for part, one in enumerate(PRIOR)]
        own = self.seconds(levels, requests) or seconds  # without the lag
        scale = max(own, 1e-9) ** 2 / sum((p * v) ** 2 for p, v in zip(prior, x[:-1], strict=False))
        if not self._spread:
            self._spread = [
                [scale * p * p if i == j else 0.0 for j in range(PARTS)] for i, p in enumerate(prior)
            ]
        toward = [_dot(row, x) for row in self._spread]
        whole = _dot(toward, x) + NOISE * max(seconds, expected, 1e-9) ** 2
        off = seconds - expected
        self._parts = [
            max(part + one * off / whole, 0.0) for part, one in zip(self._parts, toward, strict=True)
        ]
        self._spread = [
            [
                (1 - DRIFT) * (own - one * other / whole) + (DRIFT * scale * prior[i] ** 2 if i == j else 0.0)
                for j, (own, other) in enumerate(zip(row, toward, strict=True))
            ]
            for i, (row, one) in enumerate(zip(self._spread, toward, strict=True))
        ]

    @property
    def is_known(self) -> bool:
        """Whether calls of different depths were measured, or enough of one."""
        has_changed = self._levels[0] < self._levels[1]
        return self._seen >= COSTS.few_calls and (has_changed or self._seen > 2 * COSTS.few_calls)

    @property
    def lag_seconds(self) -> float:
        """Seconds for every token that the drafter has to catch up with."""
        return self._parts[4]

    def seconds(self, levels: float, requests: int = 1) -> float:
        """Return the expected time of a call of a drafter that does not lag; 0 before the first was measured."""
        return _dot(self._parts, (1.0, levels, levels * requests, requests, 0.0))

    def as_json(self, slower: float = 1.0) -> list[float]:
        """Return plain numbers that `from_json` reads, as of a machine that is so many times as slow."""
        spread = (
            [slower**2 * self._spread[i][j] for i in range(PARTS) for j in range(i + 1)]
            if self._spread
            else []
        )
        parts = [slower * part for part in self._parts]
        return [min(self._seen, MOST_SAVED), *self._levels, self._usual, *parts, *spread]

    @staticmethod
    def from_json(saved: Sequence[float]) -> "CallCost":
        """Return what `as_json` has written; raises `ValueError` for anything else."""
        numbers = [float(number) for number in saved]
        counts, parts, spread = numbers[:4], numbers[4 : 4 + PARTS], numbers[4 + PARTS :]
        if len(parts) != PARTS or len(spread) not in (0, PARTS * (PARTS + 1) // 2):
            raise ValueError("no costs of calls")
        if not all(abs(number) < MOST_NUMBER for number in numbers) or min(*counts, *parts) < 0:
            raise ValueError("costs of calls that none has")
        cost = CallCost()
        cost._seen, cost._levels = int(counts[0]), (int(counts[1]), int(counts[2]))
        cost._usual, cost._parts = max(int(counts[3]), 1), parts
        if spread:
            half = [[spread[i * (i + 1) // 2 + j] for j in range(i + 1)] for i in range(PARTS)]
            cost._spread = [[half[max(i, j)][min(i, j)] for j in range(PARTS)] for i in range(PARTS)]
        return cost


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum([a * b for a, b in zip(one, other, strict=True)])
