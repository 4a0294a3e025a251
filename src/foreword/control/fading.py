"""Counts that fade, so that what was long ago weighs little."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

FADING: float = 0.5 ** (1 / 600)
"""What a count weighs after one more judged draft: half of it after 600."""

FAST_FADING: float = 0.5 ** (1 / 60)
"""The same after the traffic has changed."""

HALF_LIFE_SECONDS = 600.0

MOST_LEVELS = 16
"""Levels that are counted apart; those below are counted with the last of these."""

MOST_RANKS = 4
"""Children of one node that are counted apart, in the drafter's order."""

_LARGEST_UNIT = 1e9


class FadingCounts:
    """How the nodes of drafts have fared by level and place among their siblings, and how deep drafts were.

    A node counts where its parent was accepted, so that a rate is that of the node itself and does not depend on how
    deep drafts are. Newer observations are counted with a larger unit instead of making all older ones smaller.
    """

    def __init__(self) -> None:
        self.unit = 1.0  # weight of the next observation
        self.reached: list[list[float]] = []  # [level][rank], nodes whose parent was accepted
        self.accepted: list[list[float]] = []  # of these, the accepted ones
        self.asked: list[float] = []  # [level], asks for drafts of at least this depth
        self.offered: list[float] = []  # of these, answers of at least this depth

    def fade(self, factor: float) -> None:
        """What was counted weighs this much from now on."""
        self.unit /= factor
        if self.unit > _LARGEST_UNIT:
            for row in (*self.reached, *self.accepted, self.asked, self.offered):
                row[:] = [count / self.unit for count in row]
            self.unit = 1.0

    def judged(self, level: int, children: int, accepted: int | None) -> None:
        """A level that was reached: how many children stood there, and which of them was right."""
        level = min(level, MOST_LEVELS - 1)
        while len(self.reached) <= level:
            self.reached.append([])
            self.accepted.append([])
        reached, right = self.reached[level], self.accepted[level]
        while len(reached) < min(children, MOST_RANKS):
            reached.append(0.0)
            right.append(0.0)
        for rank in range(min(children, MOST_RANKS)):
            reached[rank] += self.unit
        if accepted is not None:
            right[min(accepted, MOST_RANKS - 1)] += self.unit

    def answered(self, asked_depth: int, depth: int) -> None:
        """An ask and how deep its answer was; 0: there was none."""
        asked_depth = min(asked_depth, MOST_LEVELS)
        while len(self.asked) < asked_depth:
            self.asked.append(0.0)
            self.offered.append(0.0)
        for level in range(asked_depth):
            self.asked[level] += self.unit
            if level < depth:
                self.offered[level] += self.unit

    def rate(self, level: int, rank: int, prior: float, strength: float) -> float:
        """Acceptance of a node whose parent is accepted, where `prior` weighs as much as `strength` nodes."""
        if level >= len(self.reached) or rank >= len(self.reached[level]):
            return prior
        weight = strength * self.unit
        return (weight * prior + self.accepted[level][rank]) / (weight + self.reached[level][rank])

    def coverage(self, level: int, prior: float, strength: float) -> float:
        """Share of the asks whose answer has this level."""
        if level >= len(self.asked):
            return prior
        weight = strength * self.unit
        return (weight * prior + self.offered[level]) / (weight + self.asked[level])

    def ranks(self, level: int) -> int:
        """Siblings that were seen at a level."""
        return len(self.reached[level]) if level < len(self.reached) else 1

    @property
    def judged_levels(self) -> float:
        """Nodes that count, faded."""
        return sum(map(sum, self.reached)) / self.unit

    def as_json(self) -> dict[str, Any]:
        """Plain lists, in units of one observation."""
        unit = self.unit
        return {
            "reached": [[count / unit for count in row] for row in self.reached],
            "accepted": [[count / unit for count in row] for row in self.accepted],
            "asked": [count / unit for count in self.asked],
            "offered": [count / unit for count in self.offered],
        }

    @staticmethod
    def from_json(saved: dict[str, Any]) -> "FadingCounts":
        """What `as_json` has written; raises `ValueError` for anything else."""
        counts = FadingCounts()
        reached, accepted = _rows(saved.get("reached")), _rows(saved.get("accepted"))
        asked, offered = _numbers(saved.get("asked")), _numbers(saved.get("offered"))
        shapes = list(map(len, reached)) == list(map(len, accepted)) and len(asked) == len(offered)
        pairs = zip([*chain(*accepted), *offered], [*chain(*reached), *asked], strict=False)
        if not shapes or any(part > whole * (1 + 1e-9) for part, whole in pairs):
            raise ValueError("counts that contradict each other")
        counts.reached, counts.accepted = reached[:MOST_LEVELS], accepted[:MOST_LEVELS]
        counts.asked, counts.offered = asked[:MOST_LEVELS], offered[:MOST_LEVELS]
        return counts


def _rows(value: object) -> list[list[float]]:
    if not isinstance(value, Sequence):
        raise ValueError("no list of counts")
    return [_numbers(row)[:MOST_RANKS] for row in value]


def _numbers(value: object) -> list[float]:
    if not isinstance(value, list) or not all(
        isinstance(n, int | float) and 0 <= n < _LARGEST_UNIT for n in value
    ):
        raise ValueError("no list of counts")
    return [float(number) for number in value]
