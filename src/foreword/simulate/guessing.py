"""How often guesses are there, and how often they are right."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

MOST_LEVELS = 130
"""Of a chain; what nodes draft ahead included."""

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Guessing:
    """Level by level. Levels beyond the last go on as the last one does."""

    survival: tuple[float, ...]  # chance that the guesses up to this level are right, where they are there
    coverage: tuple[float, ...] = (1.0,)  # chance that a draft has a guess at this level

    @staticmethod
    def of_rate(alpha: float) -> "Guessing":
        """Every guess is right with this chance if those before it were."""
        return Guessing((alpha,))

    @property
    def first(self) -> float:
        """Chance that a first guess is right."""
        return self.survival[0]

    @cached_property
    def chances(self) -> tuple[float, ...]:
        """`survival`, for all levels that there can be."""
        before = self.survival[-2] if len(self.survival) > 1 else 1.0
        return _continued(self.survival, self.survival[-1] / before if before else 0.0)

    @property
    def is_everywhere(self) -> bool:
        """Whether there is always a guess at every level."""
        return min(self.coverage) >= 1.0


class Dice:
    """Guesses of a batch, whose requests are of several kinds of work."""

    def __init__(self, kinds: Sequence[Guessing], requests: int) -> None:
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
        """For each request, guesses that are right before the first wrong one."""
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
