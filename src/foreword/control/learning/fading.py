"""Counts that fade, so that what was long ago weighs little."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from foreword.speculation.confidence import CLASSES

FADING: float = 0.5 ** (1 / 600)
"""What a count weighs after one more judged draft: half of it after 600."""

FAST_FADING: float = 0.5 ** (1 / 60)
"""The same after the traffic has changed."""

HALF_LIFE_SECONDS = 600.0

MOST_LEVELS = 16
"""Levels that are counted apart; those below are counted with the last of these."""

MOST_RANKS = 4
"""Children of one node that are counted apart, in the drafter's order."""

# Lists as they are saved: from the beginning, and since drafts say how sure they are.
_TOLD_ALWAYS, _TOLD_SINCE = ("asked", "offered", "full"), ("kept", "ended", "sure_reached", "sure_accepted")

_LARGEST_UNIT = 1e9

_LEAST_FACTOR = 1e-300
"""What has faded for so long that a float cannot tell it from nothing still has to be divided by."""


def left_after(seconds: float, half_life: float = HALF_LIFE_SECONDS) -> float:
    """What is left of counts after this long."""
    left: float = 0.5 ** (seconds / half_life)
    return left


class FadingCounts:
    """How the nodes of drafts have fared by level and place among their siblings, and how deep drafts were.

    A node counts where its parent was accepted, so that a rate is that of the node itself and does not depend on how
    deep drafts are. Newer observations are counted with a larger unit instead of making all older ones smaller.
    """

    def __init__(self) -> None:
        self.unit = 1.0  # weight of the next observation
        self.reached: list[list[float]] = []  # [level][rank], nodes whose parent was accepted
        self.accepted: list[list[float]] = []  # of these, the accepted ones
        self.asked = [0.0] * (MOST_LEVELS + 1)  # [levels], asks for drafts of so many levels
        self.offered = [0.0] * (MOST_LEVELS + 1)  # [levels], answers to them of so many levels
        self.full = [0.0] * (MOST_LEVELS + 1)  # [levels], of these, the ones as deep as was asked for
        self.kept = [0.0] * (MOST_LEVELS + 1)  # [levels], answers of which so many were worth verifying
        self.ended = [0.0] * (MOST_LEVELS + 1)  # [levels], of these, all were right, and more was asked for
        # [classes], nodes whose parent was accepted, where drafts say how sure they are; and the accepted ones of these
        self.sure_reached = [0.0] * CLASSES
        self.sure_accepted = [0.0] * CLASSES

    def _by_depth(self) -> tuple[list[float], ...]:
        """The lists by levels of a draft."""
        return self.asked, self.offered, self.full, self.kept, self.ended

    def _by_class(self) -> tuple[list[float], ...]:
        return self.sure_reached, self.sure_accepted

    def fade(self, factor: float) -> None:
        """What was counted weighs this much from now on."""
        self.unit /= max(factor, _LEAST_FACTOR)
        if self.unit > _LARGEST_UNIT:
            for row in (*self.reached, *self.accepted, *self._by_depth(), *self._by_class()):
                row[:] = [count / self.unit for count in row]
            self.unit = 1.0

    def judged(self, level: int, children: int, accepted: int | None) -> None:
        """A level that was reached: how many children stood there, and which of them was right."""
        if level >= MOST_LEVELS:
            level = MOST_LEVELS - 1
        while len(self.reached) <= level:
            self.reached.append([0.0])
            self.accepted.append([0.0])
        reached, right = self.reached[level], self.accepted[level]
        if children == 1:
            reached[0] += self.unit
        else:
            while len(reached) < min(children, MOST_RANKS):
                reached.append(0.0)
                right.append(0.0)
            for rank in range(min(children, MOST_RANKS)):
                reached[rank] += self.unit
        if accepted is not None:
            right[min(accepted, MOST_RANKS - 1)] += self.unit

    def judged_run(self, first: int, right: int, is_stopped: bool) -> None:
        """Levels of a chain from `first` on: so many were right, and the next was wrong if it stopped there."""
        unit, end, reached, accepted = self.unit, first + right, self.reached, self.accepted
        if end >= MOST_LEVELS:
            for level in range(first, end + is_stopped):
                self.judged(level, 1, 0 if level < end else None)
            return
        while len(reached) <= end:
            reached.append([0.0])
            accepted.append([0.0])
        for level in range(first, end):
            reached[level][0] += unit
            accepted[level][0] += unit
        if is_stopped:
            reached[end][0] += unit

    def answered(self, asked_depth: int, depth: int, kept: int) -> None:
        """An ask, how deep its answer was, and how much of it was worth verifying; 0: there was none."""
        asked_depth = min(asked_depth, MOST_LEVELS)
        self.asked[asked_depth] += self.unit
        self.kept[min(kept, asked_depth)] += self.unit
        if depth >= asked_depth:
            self.full[asked_depth] += self.unit
        else:
            self.offered[depth] += self.unit

    def ended_at(self, level: int) -> None:
        """All of a draft was right that was worth verifying, and it had no such level."""
        self.ended[min(level, MOST_LEVELS)] += self.unit

    def judged_sure(self, sure: int, is_right: bool) -> None:
        """A node of this class, all above it being right."""
        self.sure_reached[sure] += self.unit
        if is_right:
            self.sure_accepted[sure] += self.unit

    def rate(self, level: int, rank: int, prior: float, strength: float) -> float:
        """Acceptance of a node whose parent is accepted, where `prior` weighs as much as `strength` nodes."""
        if level >= len(self.reached) or rank >= len(self.reached[level]):
            return prior
        weight = strength * self.unit
        return (weight * prior + self.accepted[level][rank]) / (weight + self.reached[level][rank])

    def sure_rate(self, sure: int, prior: float, strength: float) -> float:
        """Acceptance of a node of this class whose parent is accepted."""
        weight = strength * self.unit
        return (weight * prior + self.sure_accepted[sure]) / (weight + self.sure_reached[sure])

    def presence(self, level: int, prior: float, strength: float) -> float:
        """Of the drafts of which all above was right, those with such a level that was worth verifying."""
        reached = self.reached[level][0] if level < len(self.reached) else 0.0
        weight = strength * self.unit
        return (weight * prior + reached) / (weight + reached + self.ended[min(level, MOST_LEVELS)])

    def coverages(self) -> list[tuple[float, float, float]]:
        """[level], answers to asks for at least this level: that have it, that had it worth verifying, and all."""
        found, asked, having, kept = [], 0.0, 0.0, 0.0
        for level in range(MOST_LEVELS, 0, -1):
            asked += self.asked[level]
            having += self.full[level] + self.offered[level]
            kept += self.kept[level]
            found.append((having / self.unit, kept / self.unit, asked / self.unit))
        return found[::-1]

    def ranks(self, level: int) -> int:
        """Siblings that were seen at a level."""
        return len(self.reached[level]) if level < len(self.reached) else 1

    def at_most(self, most: float) -> "FadingCounts":
        """The same in units of one observation, few observations of a level in full and many as `most` of them."""
        found, whole = FadingCounts(), most * self.unit
        at_level = [most / (whole + count) for count in self.ended]
        for level, (reached, accepted) in enumerate(zip(self.reached, self.accepted, strict=True)):
            weight = at_level[level] = most / (whole + reached[0] + self.ended[level])
            found.reached.append([weight * count for count in reached])
            found.accepted.append([weight * count for count in accepted])
        weight = most / (whole + sum(self.asked))
        found.asked = [weight * count for count in self.asked]
        found.offered = [weight * count for count in self.offered]
        found.full = [weight * count for count in self.full]
        found.kept = [weight * count for count in self.kept]
        found.ended = [own * count for own, count in zip(at_level, self.ended, strict=True)]
        of_class = [most / (whole + reached) for reached in self.sure_reached]
        found.sure_reached = [own * count for own, count in zip(of_class, self.sure_reached, strict=True)]
        found.sure_accepted = [own * count for own, count in zip(of_class, self.sure_accepted, strict=True)]
        return found

    def add(self, other: "FadingCounts", times: float) -> None:
        """Count what another one has counted, so many times; what is taken back counts less than none."""
        while len(self.reached) < len(other.reached):
            self.reached.append([0.0])
            self.accepted.append([0.0])
        levels = len(other.reached)
        mine = chain(self.reached[:levels], self.accepted[:levels], self._by_depth(), self._by_class())
        others = chain(other.reached, other.accepted, other._by_depth(), other._by_class())
        for own, more in zip(mine, others, strict=True):
            own.extend([0.0] * (len(more) - len(own)))
            own[: len(more)] = [one + times * count for one, count in zip(own, more, strict=False)]

    @property
    def asks(self) -> float:
        """That count, faded."""
        return sum(self.asked) / self.unit

    def as_json(self, left: float = 1.0) -> dict[str, Any]:
        """Plain lists, in units of one observation, of which so much is left."""
        unit = self.unit / max(left, _LEAST_FACTOR)
        return {
            "reached": [[count / unit for count in row] for row in self.reached],
            "accepted": [[count / unit for count in row] for row in self.accepted],
            **{
                name: [count / unit for count in getattr(self, name)]
                for name in (*_TOLD_ALWAYS, *_TOLD_SINCE)
            },
        }

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> "FadingCounts":
        """What `as_json` has written; raises `ValueError` for anything else."""
        counts = FadingCounts()
        counts.reached, counts.accepted = _rows(saved.get("reached")), _rows(saved.get("accepted"))
        for name in _TOLD_ALWAYS:
            setattr(counts, name, _numbers(saved.get(name)))
        if "kept" in saved:
            for name in _TOLD_SINCE:
                setattr(counts, name, _numbers(saved.get(name)))
        else:  # from before drafts said how sure they are: all of a draft was worth verifying
            counts.kept = [one + other for one, other in zip(counts.offered, counts.full, strict=True)]
        depths, classes = ({len(row) for row in rows} for rows in (counts._by_depth(), counts._by_class()))
        are_alike = list(map(len, counts.reached)) == list(map(len, counts.accepted))
        if not are_alike or depths != {MOST_LEVELS + 1} or classes != {CLASSES}:
            raise ValueError("counts that do not belong together")
        parts = [*chain(*counts.accepted), *counts.sure_accepted]
        pairs = [*zip(parts, [*chain(*counts.reached), *counts.sure_reached], strict=True)]
        for having, kept, asked in counts.coverages():
            pairs += [(having, asked), (kept, having)]
        if any(part > whole * (1 + 1e-9) + 1e-9 for part, whole in pairs):
            raise ValueError("counts that contradict each other")
        return counts


def _rows(value: object) -> list[list[float]]:
    if not isinstance(value, Sequence):
        raise ValueError("no list of counts")
    if len(value) > MOST_LEVELS:
        raise ValueError("too many levels")
    if not all(value):
        raise ValueError("a level without counts")
    return [_numbers(row)[:MOST_RANKS] for row in value]


def _numbers(value: object) -> list[float]:
    if not isinstance(value, list) or not all(
        isinstance(n, int | float) and 0 <= n < _LARGEST_UNIT for n in value
    ):
        raise ValueError("no list of counts")
    return [float(number) for number in value]
