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
    "kept": LEVELS + 1,  # [levels], drafts by levels with a net benefit
    "ended": LEVELS + 1,  # [levels], of these, fully accepted ones, where more was requested
    "sure_reached": CLASSES,  # nodes whose parent was accepted, by confidence class
    "sure_accepted": CLASSES,  # of these, the accepted ones
}

_LARGEST, _LEAST = 1e9, 1e-300
"""Limits of the unit and of a decay factor, to avoid overflow and division by zero."""


class DraftCounts:
    """Draft nodes by level, sibling rank and confidence, and drafts by depth.

    A node counts only if its parent was accepted, so that a rate does not depend on draft depth. Decay increases the
    weight of new observations instead of reducing old ones.
    """

    def __init__(self) -> None:
        self.unit = 1.0  # weight of the next observation
        self.levels = 0  # levels reached so far
        self.lists = {name: [0.0] * size for name, size in SIZES.items()}
        self.reached, self.accepted = self.lists["reached"], self.lists["accepted"]
        self.asked, self.offered = self.lists["asked"], self.lists["offered"]
        self.kept, self.ended = self.lists["kept"], self.lists["ended"]
        self.sure_reached, self.sure_accepted = self.lists["sure_reached"], self.lists["sure_accepted"]

    def fade(self, factor: float) -> None:
        """Multiply all counts by this factor."""
        self.unit /= max(factor, _LEAST)
        if self.unit > _LARGEST:
            for row in self.lists.values():
                row[:] = [count / self.unit for count in row]
            self.unit = 1.0

    def add_share(self, other: "DraftCounts", most: float, left: float) -> None:
        """Add a fraction `left` of another's counts, with a total weight of at most `most`."""
        self.levels, left, requests = max(self.levels, other.levels), left / other.unit, sum(other.asked)
        by_level = [other.reached[RANKS * level] + other.ended[level] for level in range(LEVELS)]
        wholes = {
            "reached": [count for count in by_level for _ in range(RANKS)],
            "ended": [*by_level, other.ended[LEVELS]],
            "sure_reached": other.sure_reached,
            "sure_accepted": other.sure_reached,
        }
        wholes["accepted"] = wholes["reached"]
        for name, own in self.lists.items():
            many = wholes.get(name) or [requests] * len(own)
            rows = zip(own, other.lists[name], many, strict=True)
            own[:] = [one + count * left * most / (most + left * whole) for one, count, whole in rows]

    def requested(self, levels: int, depth: int, kept: int) -> None:
        """Count a draft request, its draft's depth, and its levels with a net benefit."""
        levels = min(levels, LEVELS)
        self.asked[levels] += self.unit
        self.offered[min(depth, levels)] += self.unit
        self.kept[min(kept, levels)] += self.unit

    def judged(self, level: int, children: int, accepted: int | None) -> None:
        """Count a reached level: its children, and the rank of the accepted one."""
        level = min(level, LEVELS - 1)
        self.levels, first = max(self.levels, level + 1), RANKS * level
        for rank in range(min(children, RANKS)):
            self.reached[first + rank] += self.unit
        if accepted is not None:
            self.accepted[first + min(accepted, RANKS - 1)] += self.unit

    def judged_chain(self, first: int, end: int, is_rejected: bool) -> None:
        """Count levels `first` to `end` of a chain as accepted, and the next one as rejected if it was."""
        unit, reached, accepted = self.unit, self.reached, self.accepted
        for level in range(first, end):
            place = RANKS * level if level < LEVELS else RANKS * (LEVELS - 1)
            reached[place] += unit
            accepted[place] += unit
        if is_rejected:
            reached[RANKS * min(end, LEVELS - 1)] += unit
        self.levels = max(self.levels, min(end + is_rejected, LEVELS))

    def ended_at(self, level: int) -> None:
        """Count a draft whose levels with a net benefit were all accepted."""
        self.ended[min(level, LEVELS)] += self.unit

    def judged_sure(self, classes: Sequence[int], accepted: int) -> None:
        """Count consecutive nodes of a chain by confidence class, of which the first were accepted."""
        for sure in classes:
            self.sure_reached[sure] += self.unit
        for sure in classes[:accepted]:
            self.sure_accepted[sure] += self.unit

    def rate(self, level: int, rank: int, prior: float, strength: float) -> float:
        """Return the acceptance of a node whose parent is accepted; `prior` has a pseudo-count of `strength` nodes."""
        place, weight = RANKS * level + rank, strength * self.unit
        return (weight * prior + self.accepted[place]) / (weight + self.reached[place])

    def sure_rate(self, sure: int, prior: float, strength: float) -> float:
        """Return the acceptance of a node of this confidence class."""
        weight = strength * self.unit
        return (weight * prior + self.sure_accepted[sure]) / (weight + self.sure_reached[sure])

    def presence(self, level: int, prior: float, strength: float) -> float:
        """Return the fraction of drafts, accepted so far, that have this level with a net benefit."""
        reached, weight = self.reached[RANKS * level], strength * self.unit
        return (weight * prior + reached) / (weight + reached + self.ended[level])

    def judged_at(self, level: int) -> float:
        """Return the number of drafts that reached a level."""
        return self.reached[RANKS * level] / self.unit if level < LEVELS else 0.0

    def ranks(self, level: int) -> int:
        """Return the number of siblings seen at a level."""
        return max((r + 1 for r in range(1, RANKS) if self.reached[RANKS * level + r]), default=1)

    def coverages(self) -> list[tuple[float, float, float]]:
        """Return [level] decayed draft requests of at least this depth: with the level, with it and a
        benefit, and all."""
        found, asked, having, kept = [], 0.0, 0.0, 0.0
        for level in range(LEVELS, 0, -1):
            asked += self.asked[level]
            having += self.offered[level]
            kept += self.kept[level]
            found.append((having / self.unit, kept / self.unit, asked / self.unit))
        return found[::-1]

    @property
    def requests(self) -> float:
        """Number of draft requests, decayed."""
        return sum(self.asked) / self.unit

    def as_json(self, left: float = 1.0) -> dict[str, Any]:
        """Return plain lists in units of one observation, multiplied by `left`."""
        unit = self.unit / max(left, _LEAST)
        return {name: [count / unit for count in row] for name, row in self.lists.items()}

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> "DraftCounts":
        """Restore what `as_json` returned; raise `ValueError` for anything else."""
        counts = DraftCounts()
        for name, size in SIZES.items():
            numbers = saved[name]
            if not isinstance(numbers, list) or len(numbers) != size:
                raise ValueError(f"{name} must be a list of {size} counts")
            if not all(isinstance(number, int | float) and 0 <= number < _LARGEST for number in numbers):
                raise ValueError(f"{name} must be counts")
            counts.lists[name][:] = map(float, numbers)
        if any(part > whole * (1 + 1e-9) + 1e-9 for part, whole in counts._parts()):
            raise ValueError("inconsistent counts")
        counts.levels = max(
            (1 + place // RANKS for place, count in enumerate(counts.reached) if count), default=0
        )
        return counts

    def _parts(self) -> Iterator[tuple[float, float]]:
        yield from zip(self.accepted, self.reached, strict=True)
        yield from zip(self.sure_accepted, self.sure_reached, strict=True)
        for having, kept, asked in self.coverages():
            yield from ((having, asked), (kept, having))
