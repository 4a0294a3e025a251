"""Exponentially decayed counts of draft outcomes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foreword.speculation.confidence import CLASSES

LEVELS, RANKS = 16, 4
"""Number of levels counted separately (deeper ones count as the last), and of siblings per node."""

SIZES = {
    "reached": LEVELS * RANKS,  # [level, rank], nodes whose parent was accepted
    "accepted": LEVELS * RANKS,  # of these, the accepted ones
    "asked": LEVELS + 1,  # [levels], draft requests by requested levels
    "offered": LEVELS + 1,  # [levels], drafts by depth
    "kept": LEVELS + 1,  # [levels], drafts by useful levels: those whose verification has an expected gain
    "ended": LEVELS + 1,  # [levels], drafts by useful levels if all were accepted and more were requested
    "sure_reached": CLASSES,  # [class], nodes whose parent was accepted, by confidence class
    "sure_accepted": CLASSES,  # of these, the accepted ones
}
"""Lists by their name in saved files, and their lengths."""

_LARGEST, _LEAST = 1e9, 1e-300
"""Limits of the unit and of a decay factor, to avoid overflow and division by zero."""


class DraftCounts:
    """Draft nodes by level, sibling rank and confidence class, and drafts by depth.

    A node counts only if its parent was accepted, so that a rate does not depend on draft depth. Decay increases the
    weight of new observations instead of reducing old ones.
    """

    def __init__(self) -> None:
        self.unit = 1.0  # weight of the next observation
        self.levels = 0  # levels reached so far
        self.lists = {name: [0.0] * size for name, size in SIZES.items()}
        self.reached, self.accepted, self.requested, self.depths, *others = self.lists.values()
        self.useful, self.ended, self.class_reached, self.class_accepted = others

    def fade(self, factor: float) -> None:
        """Multiply all counts by this factor."""
        self.unit /= max(factor, _LEAST)
        if self.unit > _LARGEST:
            for row in self.lists.values():
                row[:] = [count / self.unit for count in row]
            self.unit = 1.0

    def add_share(self, other: "DraftCounts", weight: float, factor: float) -> None:
        """Add another's counts times `factor`, scaled down to a total of less than `weight` observations."""
        self.levels, factor = max(self.levels, other.levels), factor / other.unit
        by_level = [other.reached[RANKS * level] + other.ended[level] for level in range(LEVELS)]
        by_node = [count for count in by_level for _ in range(RANKS)]
        requests = [sum(other.requested)] * (LEVELS + 1)
        classes = other.class_reached
        totals = (
            by_node,
            by_node,
            requests,
            requests,
            requests,
            [*by_level, other.ended[LEVELS]],
            classes,
            classes,
        )
        for own, counts, total in zip(self.lists.values(), other.lists.values(), totals, strict=True):
            rows = zip(own, counts, total, strict=True)
            own[:] = [one + count * factor * weight / (weight + factor * whole) for one, count, whole in rows]

    def count_request(self, levels: int, depth: int, useful: int) -> None:
        """Count a draft request, its draft's depth (0: no draft), and its useful levels."""
        levels = min(levels, LEVELS)
        self.requested[levels] += self.unit
        self.depths[min(depth, levels)] += self.unit
        self.useful[min(useful, levels)] += self.unit

    def count_level(self, level: int, children: int, accepted: int | None) -> None:
        """Count a reached level: its children, and the rank of the accepted one (None: all were rejected)."""
        level = level if level < LEVELS else LEVELS - 1
        if level >= self.levels:
            self.levels = level + 1
        first = RANKS * level
        for place in range(first, first + min(children, RANKS)):
            self.reached[place] += self.unit
        if accepted is not None:
            self.accepted[first + min(accepted, RANKS - 1)] += self.unit

    def count_chain(self, first: int, end: int, is_rejected: bool) -> None:
        """Count the levels `first` to `end` of a chain as accepted, and the next one as rejected if it was."""
        unit, reached, accepted = self.unit, self.reached, self.accepted
        for level in range(first, end):
            place = RANKS * level if level < LEVELS else RANKS * (LEVELS - 1)
            reached[place] += unit
            accepted[place] += unit
        if is_rejected:
            reached[RANKS * min(end, LEVELS - 1)] += unit
        if end + is_rejected > max(first, self.levels):
            self.levels = min(end + is_rejected, LEVELS)

    def count_classes(self, classes: Sequence[int], accepted: int) -> None:
        """Count reached nodes of a chain by their confidence classes; the first ones were accepted."""
        for one in classes:
            self.class_reached[one] += self.unit
        for one in classes[:accepted]:
            self.class_accepted[one] += self.unit

    def count_end(self, levels: int) -> None:
        """Count a draft with this many useful levels, which were all accepted."""
        self.ended[min(levels, LEVELS)] += self.unit

    def rate(self, level: int, rank: int, prior: float, strength: float) -> float:
        """Return the acceptance of a node whose parent is accepted; `prior` has a pseudo-count of `strength` nodes."""
        place, weight = RANKS * level + rank, strength * self.unit
        return (weight * prior + self.accepted[place]) / (weight + self.reached[place])

    def class_rate(self, confidence_class: int, prior: float, strength: float) -> float:
        """Return the acceptance of a node of this confidence class."""
        accepted, weight = self.class_accepted[confidence_class], strength * self.unit
        return (weight * prior + accepted) / (weight + self.class_reached[confidence_class])

    def presence(self, level: int, prior: float, strength: float) -> float:
        """Return the fraction of drafts, accepted so far, for which this level is useful."""
        reached, weight = self.reached[RANKS * level], strength * self.unit
        return (weight * prior + reached) / (weight + reached + self.ended[level])

    def judged_at(self, level: int) -> float:
        """Return the number of drafts that reached a level."""
        return self.reached[RANKS * level] / self.unit if level < LEVELS else 0.0

    def ranks(self, level: int) -> int:
        """Return the number of siblings seen at a level."""
        return max((rank + 1 for rank in range(1, RANKS) if self.reached[RANKS * level + rank]), default=1)

    def coverages(self) -> list[tuple[float, float, float]]:
        """Return [level] draft requests of more than `level` levels: with that level, with it useful, and all."""
        found, total = [], (0.0, 0.0, 0.0)
        for level in range(LEVELS, 0, -1):
            counts = self.depths[level], self.useful[level], self.requested[level]
            total = total[0] + counts[0], total[1] + counts[1], total[2] + counts[2]
            found.append((total[0] / self.unit, total[1] / self.unit, total[2] / self.unit))
        return found[::-1]

    @property
    def requests(self) -> float:
        """Number of draft requests, decayed."""
        return sum(self.requested) / self.unit

    def as_json(self, factor: float = 1.0) -> dict[str, Any]:
        """Return plain lists in units of one observation, multiplied by `factor`."""
        unit = self.unit / max(factor, _LEAST)
        return {name: [count / unit for count in row] for name, row in self.lists.items()}

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> "DraftCounts":
        """Restore what `as_json` returned; raise `ValueError` for anything else."""
        counts = DraftCounts()
        for name, size in SIZES.items():
            numbers = saved.get(name)
            if not isinstance(numbers, list) or len(numbers) != size:
                raise ValueError(f"{name} must be a list of {size} counts")
            if not all(isinstance(number, int | float) and 0 <= number < _LARGEST for number in numbers):
                raise ValueError(f"{name} must be non-negative numbers below {_LARGEST:g}")
            counts.lists[name][:] = map(float, numbers)
        if any(part > whole * (1 + 1e-9) + 1e-9 for part, whole in counts._parts()):
            raise ValueError("a count exceeds the count that contains it")
        counts.levels = max(
            (1 + place // RANKS for place, count in enumerate(counts.reached) if count), default=0
        )
        return counts

    def _parts(self) -> Iterator[tuple[float, float]]:
        """Yield pairs of counts of which the second contains the first."""
        yield from zip(self.accepted, self.reached, strict=True)
        yield from zip(self.class_accepted, self.class_reached, strict=True)
        for offered, useful, requested in self.coverages():
            yield from ((offered, requested), (useful, offered))
