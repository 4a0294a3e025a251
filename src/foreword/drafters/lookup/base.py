"""Shared parts of lookup drafters: state per request, and verified drafts with the target's draws."""

from collections.abc import Sequence
from typing import Generic, TypeVar

from foreword.speculation.draft import ROOT, Draft
from foreword.speculation.drafting import Commit, Drafter, DrafterNeeds, DraftRequest, DraftTask, Traits

Kept = TypeVar("Kept")


class LookupDrafter(Drafter, Generic[Kept]):
    """Drafts for each request separately, and keeps state per request until it ends."""

    def __init__(self) -> None:
        self._known: dict[int, Kept] = {}  # by request id

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        return [self.draft(task) for task in tasks]

    def draft(self, task: DraftTask) -> Draft:
        raise NotImplementedError

    def forget(self, request: DraftRequest) -> None:
        self._known.pop(request.request_id, None)


NO_NODE = -2  # marks a path that is not in the draft

READS_DRAWS = Traits(
    needs=DrafterNeeds(draws=True), needs_target="it reads what the target draws in its pass"
)
"""Traits of drafters that reuse the target's draws."""


class JudgedDraft:
    """Finds nodes by token path, since a draft may have been cut, renumbered or merged before verification."""

    def __init__(self, commit: Commit) -> None:
        draft = commit.draft
        self._draws = commit.draws
        self._nodes: dict[tuple[int, int], int] = {}
        for node, place in enumerate(zip(draft.parents, draft.tokens, strict=True)):
            self._nodes.setdefault(place, node)

    def follow(self, tokens: Sequence[int], start: int = ROOT) -> int:
        """Return the node that these tokens lead to from `start`; NO_NODE if there is none."""
        node = start
        for token in tokens:
            node = self._nodes.get((node, token), NO_NODE)
        return node

    def drawn_after(self, node: int) -> int | None:
        """Return the target's draw after a node; None if there is no such node or no draw."""
        place = node + 1
        token = self._draws[place] if 0 <= place < len(self._draws) else -1
        return token if token >= 0 else None
