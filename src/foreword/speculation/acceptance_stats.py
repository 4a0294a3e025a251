"""Acceptance statistics of drafts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


class DraftOutcome(NamedTuple):
    """Result of one draft request."""

    requested: bool  # whether a draft was requested
    nodes: int  # judged nodes
    depth: int  # judged levels
    accepted: int  # committed levels
    unjudged: int = 0  # nodes beyond the answer's end


@dataclass
class AcceptanceStats:
    """Draft counts of one request or one cohort."""

    draft_requests: int = 0
    drafts: int = 0  # draft requests that returned a draft which was judged
    drafted: int = 0  # judged nodes
    accepted: int = 0  # committed nodes
    unjudged: int = 0  # nodes beyond an answer's end: computed, but neither accepted nor rejected
    # Number of drafts by (levels, committed levels). Updated every step; the per-position lists are computed on
    # demand.
    _outcomes: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of drafts, of verified draft tokens and of committed draft tokens."""
        return self.drafts, self.drafted, self.accepted

    @property
    def coverage(self) -> float | None:
        """Fraction of draft requests that returned a draft; None before the first request."""
        return self.drafts / self.draft_requests if self.draft_requests else None

    def observe(self, outcome: DraftOutcome) -> None:
        """Count one step."""
        requested, nodes, depth, accepted, unjudged = outcome
        self.draft_requests += requested
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
        """Number of drafts that reach each level."""
        return self._per_position(lambda level, accepted: True)

    @property
    def accepted_per_position(self) -> list[int]:
        """Number of drafts accepted at each level."""
        return self._per_position(lambda level, accepted: level < accepted)

    @property
    def rejected_per_position(self) -> list[int]:
        """Number of drafts whose first rejected token is at each level."""
        return self._per_position(lambda level, accepted: level == accepted)

    def _per_position(self, counts: Callable[[int, int], bool]) -> list[int]:
        """Return, for each level, the number of drafts for which `counts(level, accepted levels)` is true."""
        deepest = max((depth for depth, _ in self._outcomes), default=0)
        totals = [0] * deepest
        # A copy of the items, since another thread may read statistics while the engine adds outcomes.
        for (depth, accepted), drafts in list(self._outcomes.items()):
            for level in range(depth):
                if counts(level, accepted):
                    totals[level] += drafts
        return totals
