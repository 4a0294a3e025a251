"""How drafts have fared."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from foreword.speculation.draft import Draft


@dataclass
class AcceptanceStats:
    """How the drafts of a request, or of a cohort, have fared."""

    asks: int = 0  # times that a drafter was asked
    drafts: int = 0  # of these, the ones with an answer that was judged
    drafted: int = 0  # nodes that were judged
    accepted: int = 0  # nodes that were committed
    unjudged: int = 0  # nodes beyond an answer's end: computed, and neither right nor wrong
    drafted_per_position: list[int] = field(default_factory=list)  # drafts that have this level
    # Of these, accepted at all levels before it.
    reached_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)  # drafts accepted at this level
    # Drafts whose first rejected guess is here.
    rejected_per_position: list[int] = field(default_factory=list)

    @property
    def coverage(self) -> float | None:
        """Share of the asks that had an answer; None before the first."""
        return self.drafts / self.asks if self.asks else None

    def observe(self, asked: bool, draft: Draft, accepted: int, unjudged: int = 0) -> None:
        """Count a step: whether a drafter was asked, what was judged, and how many levels of it were committed."""
        self.asks += asked
        self.unjudged += unjudged
        depth = draft.depth
        if not depth:
            return
        self.drafts += 1
        self.drafted += len(draft)
        self.accepted += accepted
        for counts in self._levels():
            counts.extend([0] * (depth - len(counts)))
        for level in range(depth):
            self.drafted_per_position[level] += 1
            self.reached_per_position[level] += level <= accepted
            self.accepted_per_position[level] += level < accepted
        if accepted < depth:
            self.rejected_per_position[accepted] += 1

    def _levels(self) -> Iterator[list[int]]:
        yield self.drafted_per_position
        yield self.reached_per_position
        yield self.accepted_per_position
        yield self.rejected_per_position
