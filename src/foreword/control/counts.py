"""Exponentially decayed counts of draft outcomes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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

_ENDS = np.cumsum(list(SIZES.values()))
_LARGEST = 1e9


class DraftCounts:
    """Draft nodes by level, sibling rank and confidence, and drafts by depth.

    A node counts only if its parent was accepted, so that a rate does not depend on draft depth.
    """

    def __init__(self) -> None:
        self._all = np.zeros(_ENDS[-1])
        views = np.split(self._all, _ENDS[:-1])
        self.lists = dict(zip(SIZES, views, strict=True))
        self.reached, self.accepted, self.asked, self.offered = views[:4]
        self.kept, self.ended, self.sure_reached, self.sure_accepted = views[4:]

    def fade(self, factor: float) -> None:
        """Multiply all counts by this factor."""
        self._all *= factor

    def add_share(self, other: "DraftCounts", most: float, left: float) -> None:
        """Add a fraction `left` of another's counts, with a total weight of at most `most`."""
        by_level = other.reached[::RANKS] + other.ended[:LEVELS]
        by_node, requests = np.repeat(by_level, RANKS), np.full(3 * (LEVELS + 1), other.requests)
        ended, sure = [*by_level, other.ended[LEVELS]], other.sure_reached
        whole = left * np.concatenate([by_node, by_node, requests, ended, sure, sure])
        self._all += other._all * (left * most / (most + whole))

    def requested(self, levels: int, depth: int, kept: int) -> None:
        """Count a draft request, its draft's depth, and its levels with a net benefit."""
        levels = min(levels, LEVELS)
        self.asked[levels] += 1
        self.offered[min(depth, levels)] += 1
        self.kept[min(kept, levels)] += 1

    def judged(self, level: int, children: int, accepted: int | None) -> None:
        """Count a reached level: its children, and the rank of the accepted one."""
        first = RANKS * min(level, LEVELS - 1)
        self.reached[first : first + min(children, RANKS)] += 1
        if accepted is not None:
            self.accepted[first + min(accepted, RANKS - 1)] += 1

    def judged_chain(self, first: int, end: int, is_rejected: bool) -> None:
        """Count levels `first` to `end` of a chain as accepted, and the next one as rejected if it was."""
        for level in range(LEVELS, end):  # they count as the last level
            self.judged(level, 1, 0)
        self.accepted[RANKS * first : RANKS * end : RANKS] += 1
        self.reached[RANKS * first : RANKS * min(end + is_rejected, LEVELS) : RANKS] += 1

    def ended_at(self, level: int) -> None:
        """Count a draft whose levels with a net benefit were all accepted."""
        self.ended[min(level, LEVELS)] += 1

    def judged_sure(self, classes: Sequence[int], accepted: int) -> None:
        """Count consecutive nodes of a chain by confidence class, of which the first were accepted."""
        for sure in classes:
            self.sure_reached[sure] += 1
        for sure in classes[:accepted]:
            self.sure_accepted[sure] += 1

    def rate(self, level: int, rank: int, prior: float, strength: float) -> float:
        """Return the acceptance of a node whose parent is accepted; `prior` has a pseudo-count of `strength` nodes."""
        place = RANKS * level + rank
        return float((strength * prior + self.accepted[place]) / (strength + self.reached[place]))

    def sure_rates(self, priors: Sequence[float], strength: float) -> list[float]:
        """Return [classes] the acceptance of nodes by confidence class."""
        found = (strength * np.array(priors) + self.sure_accepted) / (strength + self.sure_reached)
        return found.tolist()

    def presence(self, level: int, prior: float, strength: float) -> float:
        """Return the fraction of drafts, accepted so far, that have this level with a net benefit."""
        reached = self.reached[RANKS * level]
        return float((strength * prior + reached) / (strength + reached + self.ended[level]))

    def judged_at(self, level: int) -> float:
        """Return the number of drafts that reached a level."""
        return float(self.reached[RANKS * level]) if level < LEVELS else 0.0

    def ranks(self, level: int) -> int:
        """Return the number of siblings seen at a level."""
        first = RANKS * level
        return max((r + 1 for r in range(1, RANKS) if self.reached[first + r]), default=1)

    def coverages(self) -> list[tuple[float, float, float]]:
        """Return [level] draft requests of at least this depth: with the level, with it and a benefit, and all."""
        parts = (self.offered, self.kept, self.asked)
        return list(zip(*[np.cumsum(part[:0:-1])[::-1].tolist() for part in parts], strict=True))

    @property
    def levels(self) -> int:
        """Number of levels that drafts have reached."""
        return int(np.count_nonzero(self.reached[::RANKS]))

    @property
    def requests(self) -> float:
        """Number of draft requests, decayed."""
        return float(self.asked.sum())

    def as_json(self, left: float = 1.0) -> dict[str, Any]:
        """Return plain lists, multiplied by `left`."""
        return {name: (left * counts).tolist() for name, counts in self.lists.items()}

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
            counts.lists[name][:] = numbers
        parts = [*zip(counts.accepted, counts.reached, strict=True)]
        parts += zip(counts.sure_accepted, counts.sure_reached, strict=True)
        for having, kept, asked in counts.coverages():
            parts += ((having, asked), (kept, having))
        if any(part > whole * (1 + 1e-9) + 1e-9 for part, whole in parts):
            raise ValueError("inconsistent counts")
        return counts
