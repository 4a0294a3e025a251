"""Simulated costs in seconds, and coverage and acceptance of drafts."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class PassTimes:
    """Pass time by rows: piecewise linear, extrapolated beyond the last point."""

    points: tuple[tuple[int, float], ...]  # by rows, ascending

    @staticmethod
    def straight(first: float, per_row: float) -> "PassTimes":
        """Return a line from the time of one row and the time per further row."""
        return PassTimes(((1, first), (2, first + per_row)))

    @property
    def most_measured(self) -> int:
        """Rows beyond which times are extrapolated."""
        return self.points[-1][0]

    def seconds(self, rows: int) -> float:
        points = self.points
        if len(points) == 1:
            return points[0][1]
        place = min(max(bisect_left(points, (rows, 0.0)), 1), len(points) - 1)
        (low, early), (high, late) = points[place - 1], points[place]
        found = early + (late - early) * (rows - low) / (high - low)
        return max(found, late) if rows > high else found


@dataclass(frozen=True)
class LevelTimes:
    """Drafting times of one device."""

    level: float  # per level of one request
    per_request: float = 0.0  # per further request in a round
    first: float = 0.0  # before the first level

    def seconds(self, requests: int) -> float:
        """Return the time of one level for `requests` requests."""
        return self.level + self.per_request * (requests - 1)

    def scaled(self, level: float) -> "LevelTimes":
        """Return the times scaled to this time per level."""
        per_request = self.per_request * level / self.level if self.level else 0.0
        return LevelTimes(level, per_request, self.first)


@dataclass(frozen=True)
class SimulatedCosts:
    """All costs of a simulation."""

    passes: PassTimes
    local: LevelTimes  # on the target's device
    node: LevelTimes  # on a draft node
    host: float = 0.0  # host time per step, besides pass and draft
    drafting_host: float = 0.0  # additional host time of a step with drafts
    per_row: float = 0.0  # per judged row
    remote: float = 0.0  # host time for draft nodes, per step
    remote_per_request: float = 0.0
    prompt: float = 0.0  # per prompt token on the target
    node_prompt: float = 0.0  # per prompt token on a draft node

    def step(self, requests: int, drafted: int, prompt_tokens: int = 0) -> float:
        """Return the time of a step without its draft."""
        rows = requests + drafted
        seconds = self.passes.seconds(rows) + self.host + self.per_row * rows + self.prompt * prompt_tokens
        return seconds + self.drafting_host if drafted else seconds

    def telling(self, requests: int) -> float:
        """Return the target's time for notifying nodes in a step."""
        return self.remote + self.remote_per_request * (requests - 1)


ILLUSTRATIVE = SimulatedCosts(
    passes=PassTimes.straight(15e-3, 15e-3 / 400),
    local=LevelTimes(0.8e-3, 0.8e-3 / 200),
    node=LevelTimes(0.8e-3, 0.8e-3 / 200),
    remote=0.1e-3,
    remote_per_request=0.2e-3 / 15,
    prompt=0.05e-3,
    node_prompt=0.005e-3,
)
"""A large target and a draft model about twenty times as fast: plausible assumptions."""


MOST_LEVELS = 130
"""Maximum chain length including run-ahead."""

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AcceptanceCurve:
    """Acceptance by level; deeper levels continue the last one."""

    survival: tuple[float, ...]  # probability that a draft is accepted up to this level, if it has it
    coverage: tuple[float, ...] = (1.0,)  # probability that a draft has this level

    @staticmethod
    def of_rate(alpha: float) -> "AcceptanceCurve":
        """Return the curve of a constant acceptance rate per level."""
        return AcceptanceCurve((alpha,))

    @property
    def first(self) -> float:
        """Return the acceptance of a first draft token."""
        return self.survival[0]

    @cached_property
    def chances(self) -> tuple[float, ...]:
        """`survival` for all possible levels."""
        before = self.survival[-2] if len(self.survival) > 1 else 1.0
        return _continued(self.survival, self.survival[-1] / before if before else 0.0)

    @property
    def is_everywhere(self) -> bool:
        """Return whether drafts always have every level."""
        return min(self.coverage) >= 1.0


class Dice:
    """Samples drafts and acceptance of a batch with several kinds of work."""

    def __init__(self, kinds: Sequence[AcceptanceCurve], requests: int) -> None:
        self._kinds = kinds
        self._of = np.arange(requests) % len(kinds)  # kind of each request
        self._next = requests % len(kinds)
        self._is_everywhere = all(kind.is_everywhere for kind in kinds)
        self._right = np.array([kind.chances for kind in kinds])
        width = max(len(kind.coverage) for kind in kinds)
        self._there = np.array(
            [(1.0,) * width if kind.is_everywhere else _filled(kind.coverage, width) for kind in kinds]
        )

    @cached_property
    def chances(self) -> tuple[float, ...]:
        """Mean acceptance by level over all kinds, which is what a target knows of a node."""
        return tuple(self._right.mean(0).tolist())

    def renew(self, place: int) -> None:
        """Replace a request by one of the next kind."""
        self._of[place] = self._next
        self._next = (self._next + 1) % len(self._kinds)

    def right(self, rng: np.random.Generator) -> Counts:
        """Return, per request, the accepted levels."""
        return _below(self._right, self._of, rng)

    def lengths(self, rng: np.random.Generator, most: int) -> Counts:
        """Return, per request, the available levels out of `most`."""
        if self._is_everywhere:
            return np.full(len(self._of), most)
        found = _below(self._there, self._of, rng)
        return np.minimum(np.where(found == self._there.shape[1], most, found), most)


def _below(chances: npt.NDArray[np.float64], kinds: Counts, rng: np.random.Generator) -> Counts:
    """Return, per request, how many of its kind's falling probabilities exceed a random number."""
    drawn = rng.random(len(kinds))
    if len(chances) == 1:
        return np.searchsorted(-chances[0], -drawn)
    found: Counts = (chances[kinds] > drawn[:, None]).sum(1)
    return found


def _filled(coverage: Sequence[float], width: int) -> tuple[float, ...]:
    return (*coverage, *(0.0,) * (width - len(coverage)))


def _continued(levels: Sequence[float], factor: float) -> tuple[float, ...]:
    found = list(levels)
    while len(found) < MOST_LEVELS:
        found.append(found[-1] * min(factor, 1.0))
    return tuple(found)
