"""A draft that was judged, with what the target itself drew after every node."""

from collections.abc import Sequence

from foreword.speculation.draft import ROOT
from foreword.speculation.drafting import Commit, DrafterNeeds, Traits

NO_NODE = -2
"""Where the draft does not go on so."""

READS_DRAWS = Traits(
    needs=DrafterNeeds(draws=True), needs_target="it reads what the target draws in its pass"
)
"""Traits of drafters that draft what the target drew."""


class JudgedDraft:
    """Finds nodes by their tokens: a draft may have been cut, renumbered or merged before it was judged."""

    def __init__(self, commit: Commit) -> None:
        draft = commit.draft
        self._draws = commit.draws
        self._nodes: dict[tuple[int, int], int] = {}
        for node, place in enumerate(zip(draft.parents, draft.tokens, strict=True)):
            self._nodes.setdefault(place, node)

    def follow(self, tokens: Sequence[int], start: int = ROOT) -> int:
        """The node that these tokens lead to from another; NO_NODE if there is none."""
        node = start
        for token in tokens:
            node = self._nodes.get((node, token), NO_NODE)
        return node

    def drawn_after(self, node: int) -> int | None:
        """What the target draws after a node; None where there is no such node or the target can draw nothing."""
        place = node + 1
        token = self._draws[place] if 0 <= place < len(self._draws) else -1
        return token if token >= 0 else None
