"""How drafts have fared."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


class DraftOutcome(NamedTuple):
    """What came of a draft."""

    asked: bool  # whether a drafter was asked
    nodes: int  # that were judged
    depth: int  # levels of these
    accepted: int  # levels that were committed
    unjudged: int = 0


@dataclass
class AcceptanceStats:
    """How the drafts of a request, or of a cohort, have fared."""

    asks: int = 0  # times that a drafter was asked
    drafts: int = 0  # of these, the ones with an answer that was judged
    drafted: int = 0  # nodes that were judged
    accepted: int = 0  # nodes that were committed
    unjudged: int = 0  # nodes beyond an answer's end: computed, and neither right nor wrong
    # Drafts by their levels and by how many of these were committed: every step counts, and positions are seldom asked.
    _outcomes: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def coverage(self) -> float | None:
        """Share of the asks that had an answer; None before the first."""
        return self.drafts / self.asks if self.asks else None

    def observe(self, outcome: DraftOutcome) -> None:
        """Count a step."""
        asked, nodes, depth, accepted, unjudged = outcome
        self.asks += asked
        self.unjudged += unjudged
        if not nodes:
            return
        self.drafts += 1
        self.drafted += nodes
        self.accepted += accepted
        key = depth, accepted
        self._outcomes[key] = self._outcomes.get(key, 0) + 1

    @property
    def drafted_per_position(self) -> list[int]:
        """Drafts that have this level."""
        return self._per_position(lambda level, accepted: True)

    @property
    def reached_per_position(self) -> list[int]:
        """Of these, accepted at all levels before it."""
        return self._per_position(lambda level, accepted: level <= accepted)

    @property
    def accepted_per_position(self) -> list[int]:
        """Drafts accepted at this level."""
        return self._per_position(lambda level, accepted: level < accepted)

    @property
    def rejected_per_position(self) -> list[int]:
        """Drafts whose first rejected token is here."""
        return self._per_position(lambda level, accepted: level == accepted)

    def _per_position(self, counts: Callable[[int, int], bool]) -> list[int]:
        deepest = max((depth for depth, _ in self._outcomes), default=0)
        found = [0] * deepest
        for (depth, accepted), drafts in list(self._outcomes.items()):
            for level in range(depth):
                found[level] += drafts * counts(level, accepted)
        return found
