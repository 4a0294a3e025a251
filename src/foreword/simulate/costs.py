"""What things take, in seconds, and how often draft tokens are there and accepted: measured or assumed."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a target's pass by its rows: straight lines between what is known, and on beyond the last."""

    points: tuple[tuple[int, float], ...]  # by rows, rising

    @staticmethod
    def straight(first: float, per_row: float) -> "PassTimes":
        """A pass over one row, and what every further one adds."""
        return PassTimes(((1, first), (2, first + per_row)))

    @property
    def most_measured(self) -> int:
        """Rows beyond which times are drawn on from the last two."""
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
    """Drafting on one device."""

    level: float  # one level for one request
    per_request: float = 0.0  # more, for each further request of the same round
    first: float = 0.0  # before the first level of a draft

    def seconds(self, requests: int) -> float:
        """One level for so many requests."""
        return self.level + self.per_request * (requests - 1)

    def scaled(self, level: float) -> "LevelTimes":
        """With a level that takes as long as this, and further requests in proportion."""
        per_request = self.per_request * level / self.level if self.level else 0.0
        return LevelTimes(level, per_request, self.first)


@dataclass(frozen=True)
class SimulatedCosts:
    """All of them."""

    passes: PassTimes
    local: LevelTimes  # drafting on the target's own device
    node: LevelTimes  # drafting on a draft node
    host: float = 0.0  # of a step, beside its pass and its draft
    guessing_host: float = 0.0  # more of a step with drafts
    per_row: float = 0.0  # of a step, for every row that is judged
    remote: float = 0.0  # work of the target's own thread for its draft nodes, per step
    remote_per_request: float = 0.0
    prompt: float = 0.0  # a token of a prompt, at the target
    node_prompt: float = 0.0  # and at a draft node

    def step(self, requests: int, drafted: int, prompt_tokens: int = 0) -> float:
        """A step without its draft."""
        rows = requests + drafted
        seconds = self.passes.seconds(rows) + self.host + self.per_row * rows + self.prompt * prompt_tokens
        return seconds + self.guessing_host if drafted else seconds

    def telling(self, requests: int) -> float:
        """The target's work for its nodes in a step."""
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
"""A large target and a draft model about twenty times as fast: assumed values of the right size."""


MOST_LEVELS = 130
"""Of a chain; what nodes draft ahead included."""

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AcceptanceCurve:
    """Level by level. Levels beyond the last go on as the last one does."""

    survival: tuple[float, ...]  # chance that a draft is accepted up to this level, where it has it
    coverage: tuple[float, ...] = (1.0,)  # chance that a draft has this level

    @staticmethod
    def of_rate(alpha: float) -> "AcceptanceCurve":
        """Return the curve where every level is accepted with this chance if those before it were."""
        return AcceptanceCurve((alpha,))

    @property
    def first(self) -> float:
        """Return the chance that a first draft token is accepted."""
        return self.survival[0]

    @cached_property
    def chances(self) -> tuple[float, ...]:
        """`survival`, for all levels that there can be."""
        before = self.survival[-2] if len(self.survival) > 1 else 1.0
        return _continued(self.survival, self.survival[-1] / before if before else 0.0)

    @property
    def is_everywhere(self) -> bool:
        """Return whether a draft always has every level."""
        return min(self.coverage) >= 1.0


class Dice:
    """Draws drafts and acceptance of a batch, whose requests are of several kinds of work."""

    def __init__(self, kinds: Sequence[AcceptanceCurve], requests: int) -> None:
        self._kinds = kinds
        self._of = np.arange(requests) % len(kinds)  # the kind of each request
        self._next = requests % len(kinds)
        self._is_everywhere = all(kind.is_everywhere for kind in kinds)
        self._right = np.array([kind.chances for kind in kinds])
        width = max(len(kind.coverage) for kind in kinds)
        self._there = np.array(
            [(1.0,) * width if kind.is_everywhere else _filled(kind.coverage, width) for kind in kinds]
        )

    @cached_property
    def chances(self) -> tuple[float, ...]:
        """By level, that it is right: the mean of all kinds, which is what is known of a node."""
        return tuple(self._right.mean(0).tolist())

    def renew(self, place: int) -> None:
        """Another request, of the kind whose turn it is."""
        self._of[place] = self._next
        self._next = (self._next + 1) % len(self._kinds)

    def right(self, rng: np.random.Generator) -> Counts:
        """Return, for each request, the levels that are accepted before the first rejected one."""
        return _below(self._right, self._of, rng)

    def lengths(self, rng: np.random.Generator, most: int) -> Counts:
        """For each request, levels that its draft has, of `most` that are wanted."""
        if self._is_everywhere:
            return np.full(len(self._of), most)
        found = _below(self._there, self._of, rng)
        return np.minimum(np.where(found == self._there.shape[1], most, found), most)


def _below(chances: npt.NDArray[np.float64], kinds: Counts, rng: np.random.Generator) -> Counts:
    """For each request, how many of its kind's falling chances are above a number drawn for it."""
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
