"""Exponentially decayed counts of how drafts have fared."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from foreword.speculation.confidence import CLASSES

MOST_LEVELS, MOST_RANKS = 16, 4
"""Levels that are counted apart, deeper ones with the last of these, and children of one node."""

BY_DEPTH, BY_CLASS = ("asked", "offered", "full", "kept", "ended"), ("sure_reached", "sure_accepted")
FIRST_SAVED = 3
"""Lists as they are saved; the first three of them are in all files, the others since drafts have confidences."""

_LARGEST, _LEAST = 1e9, 1e-300
"""Bounds of the unit, and of a factor: what has decayed for weeks still has to be divided by."""


class DraftCounts:
    """Nodes of drafts by level, by rank among siblings and by confidence, and drafts by depth.

    A node counts where its parent was accepted, so that a rate does not depend on how deep drafts are. Newer
    observations are counted with a larger unit instead of making all older ones smaller.
    """

    def __init__(self) -> None:
        self.unit = 1.0  # weight of the next observation
        self.reached: list[list[float]] = []  # [level][rank], nodes whose parent was accepted
        self.accepted: list[list[float]] = []  # of these, the accepted ones
        self.asked = [0.0] * (MOST_LEVELS + 1)  # [levels], draft requests for so many levels
        self.offered = [0.0] * (MOST_LEVELS + 1)  # [levels], drafts that were less deep than requested
        self.full = [0.0] * (MOST_LEVELS + 1)  # [levels], drafts that were as deep as requested
        self.kept = [0.0] * (MOST_LEVELS + 1)  # [levels], drafts of which so many had a net benefit
        self.ended = [0.0] * (
            MOST_LEVELS + 1
        )  # [levels], of these, all were accepted, and more was requested
        self.sure_reached = [0.0] * CLASSES  # nodes whose parent was accepted, by confidence
        self.sure_accepted = [0.0] * CLASSES  # of these, the accepted ones

    def _lists(self) -> list[list[float]]:
        return [getattr(self, name) for name in (*BY_DEPTH, *BY_CLASS)]

    def fade(self, factor: float) -> None:
        """Multiply everything that was counted by this factor."""
        self.unit /= max(factor, _LEAST)
        if self.unit > _LARGEST:
            for row in (*self.reached, *self.accepted, *self._lists()):
                row[:] = [count / self.unit for count in row]
            self.unit = 1.0

    def judged(self, level: int, children: int, accepted: int | None) -> None:
        """Count a level that was reached: its children, and the rank of the accepted one."""
        level = min(level, MOST_LEVELS - 1)
        self._extend(level)
        reached, right = self.reached[level], self.accepted[level]
        more = [0.0] * (min(children, MOST_RANKS) - len(reached))
        reached += more
        right += more
        for rank in range(min(children, MOST_RANKS)):
            reached[rank] += self.unit
        if accepted is not None:
            right[min(accepted, MOST_RANKS - 1)] += self.unit

    def judged_run(self, first: int, right: int, is_stopped: bool) -> None:
        """Count levels of a chain from `first` on: so many were accepted, and the next was rejected if it stopped."""
        unit, end, reached, accepted = self.unit, first + right, self.reached, self.accepted
        if end >= MOST_LEVELS:
            for level in range(first, end + is_stopped):
                self.judged(level, 1, 0 if level < end else None)
            return
        self._extend(end)
        for level in range(first, end):
            reached[level][0] += unit
            accepted[level][0] += unit
        if is_stopped:
            reached[end][0] += unit

    def _extend(self, level: int) -> None:
        while len(self.reached) <= level:
            self.reached.append([0.0])
            self.accepted.append([0.0])

    def answered(self, asked_depth: int, depth: int, kept: int) -> None:
        """Count a draft request, the depth of its draft, and how many of its levels had a net benefit."""
        asked_depth = min(asked_depth, MOST_LEVELS)
        self.asked[asked_depth] += self.unit
        self.kept[min(kept, asked_depth)] += self.unit
        if depth >= asked_depth:
            self.full[asked_depth] += self.unit
        else:
            self.offered[depth] += self.unit

    def ended_at(self, level: int) -> None:
        """Count a draft whose levels with a net benefit were all accepted, and that had no more of them."""
        self.ended[min(level, MOST_LEVELS)] += self.unit

    def judged_sure(self, sure: int, is_right: bool) -> None:
        """Count a node of this confidence class whose parent was accepted."""
        self.sure_reached[sure] += self.unit
        if is_right:
            self.sure_accepted[sure] += self.unit

    def rate(self, level: int, rank: int, prior: float, strength: float) -> float:
        """Return the acceptance of a node whose parent is accepted; `prior` weighs as much as `strength` nodes."""
        if level >= len(self.reached) or rank >= len(self.reached[level]):
            return prior
        weight = strength * self.unit
        return (weight * prior + self.accepted[level][rank]) / (weight + self.reached[level][rank])

    def sure_rate(self, sure: int, prior: float, strength: float) -> float:
        """Return the same for a node of this confidence class."""
        weight = strength * self.unit
        return (weight * prior + self.sure_accepted[sure]) / (weight + self.sure_reached[sure])

    def presence(self, level: int, prior: float, strength: float) -> float:
        """Return the share of drafts, accepted so far, that have this level with a net benefit."""
        reached = self.judged_at(level) * self.unit
        weight = strength * self.unit
        return (weight * prior + reached) / (weight + reached + self.ended[min(level, MOST_LEVELS)])

    def judged_at(self, level: int) -> float:
        """Return how many drafts have reached a level."""
        return self.reached[level][0] / self.unit if level < len(self.reached) else 0.0

    def coverages(self) -> list[tuple[float, float, float]]:
        """Return [level] draft requests for at least this level: that got it, that had it with a benefit, and all."""
        found, asked, having, kept = [], 0.0, 0.0, 0.0
        for level in range(MOST_LEVELS, 0, -1):
            asked += self.asked[level]
            having += self.full[level] + self.offered[level]
            kept += self.kept[level]
            found.append((having / self.unit, kept / self.unit, asked / self.unit))
        return found[::-1]

    def ranks(self, level: int) -> int:
        """Return the siblings that were seen at a level."""
        return len(self.reached[level]) if level < len(self.reached) else 1

    def add_share(self, other: "DraftCounts", most: float, left: float) -> None:
        """Add another's counts, of which so much is left: few in full, many with the weight of at most `most`."""
        per_unit = left / other.unit

        def share(count: float) -> float:
            return per_unit * most / (most + per_unit * count)

        if other.reached:
            self._extend(len(other.reached) - 1)
        of_level = [share(count) for count in other.ended]
        for level, (reached, accepted) in enumerate(zip(other.reached, other.accepted, strict=True)):
            weight = of_level[level] = share(reached[0] + other.ended[level])
            _add(self.reached[level], reached, weight)
            _add(self.accepted[level], accepted, weight)
        of_all = share(sum(other.asked))
        for name in BY_DEPTH[:-1]:
            _add(getattr(self, name), getattr(other, name), of_all)
        self.ended = [
            one + own * more for one, own, more in zip(self.ended, of_level, other.ended, strict=True)
        ]
        for sure, reached_here in enumerate(other.sure_reached):
            weight = share(reached_here)
            self.sure_reached[sure] += weight * reached_here
            self.sure_accepted[sure] += weight * other.sure_accepted[sure]

    @property
    def asks(self) -> float:
        """Draft requests, decayed."""
        return sum(self.asked) / self.unit

    def as_json(self, left: float = 1.0) -> dict[str, Any]:
        """Return plain lists, in units of one observation, of which so much is left."""
        unit = self.unit / max(left, _LEAST)
        lists = {name: [count / unit for count in getattr(self, name)] for name in (*BY_DEPTH, *BY_CLASS)}
        rows = {
            name: [[c / unit for c in row] for row in getattr(self, name)] for name in ("reached", "accepted")
        }
        return {**rows, **lists}

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> "DraftCounts":
        """Return what `as_json` has written; raises `ValueError` for anything else."""
        counts, names = DraftCounts(), (*BY_DEPTH, *BY_CLASS)
        counts.reached, counts.accepted = _rows(saved.get("reached")), _rows(saved.get("accepted"))
        is_old = "kept" not in saved  # from before drafts had confidences: all of a draft had a net benefit
        for name in names[:FIRST_SAVED] if is_old else names:
            setattr(counts, name, _numbers(saved.get(name)))
        if is_old:
            counts.kept = [one + other for one, other in zip(counts.offered, counts.full, strict=True)]
        are_alike = list(map(len, counts.reached)) == list(map(len, counts.accepted))
        sizes = [len(row) for row in counts._lists()]
        if not are_alike or sizes != [MOST_LEVELS + 1] * len(BY_DEPTH) + [CLASSES] * len(BY_CLASS):
            raise ValueError("counts that do not belong together")
        parts = [*chain(*counts.accepted), *counts.sure_accepted]
        pairs = [*zip(parts, [*chain(*counts.reached), *counts.sure_reached], strict=True)]
        for having, kept, asked in counts.coverages():
            pairs += [(having, asked), (kept, having)]
        if any(part > whole * (1 + 1e-9) + 1e-9 for part, whole in pairs):
            raise ValueError("counts that contradict each other")
        return counts


def _add(own: list[float], more: Sequence[float], weight: float) -> None:
    own += [0.0] * (len(more) - len(own))
    for place, count in enumerate(more):
        own[place] += weight * count


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
        isinstance(n, int | float) and 0 <= n < _LARGEST for n in value
    ):
        raise ValueError("no list of counts")
    return [float(number) for number in value]
