"""Base class of lookup drafters, and lookup of the target's draws in a verified draft."""

from collections.abc import Sequence
from typing import Generic, TypeVar

from foreword.speculation.draft import ROOT, Draft
from foreword.speculation.drafting import Commit, Drafter, DrafterNeeds, DraftRequest, DraftTask, Traits

State = TypeVar("State")


class LookupDrafter(Drafter, Generic[State]):
    """Drafts for each request separately, and keeps state per request until it ends."""

    def __init__(self) -> None:
        self._known: dict[int, State] = {}  # by request id

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        return [self.draft(task) for task in tasks]

    def draft(self, task: DraftTask) -> Draft:
        """Return the draft of one task; subclasses implement this."""
        raise NotImplementedError

    def forget(self, request: DraftRequest) -> None:
        self._known.pop(request.request_id, None)


NO_NODE = -2  # marks a path that is not in the draft

READS_DRAWS = Traits(
    needs=DrafterNeeds(draws=True),
    needs_target="it reads the tokens that the target samples for draft positions",
)
"""Traits of drafters that reuse the target's draws."""


class JudgedDraft:
    """A verified draft with the tokens that the target drew after its nodes.

    Nodes are found by their tokens. A draft may be cut or merged before verification, which changes node numbers.
    """

    def __init__(self, commit: Commit) -> None:
        draft = commit.draft
        self._draws = commit.draws
        self._nodes: dict[tuple[int, int], int] = {}  # by parent and token
        for node, parent_and_token in enumerate(zip(draft.parents, draft.tokens, strict=True)):
            self._nodes.setdefault(parent_and_token, node)

    def follow(self, tokens: Sequence[int], start: int = ROOT) -> int:
        """Return the node at the end of the path with these tokens from `start`; NO_NODE if there is no such path."""
        node = start
        for token in tokens:
            node = self._nodes.get((node, token), NO_NODE)
        return node

    def drawn_after(self, node: int) -> int | None:
        """Return the target's draw after a node; None if there is no such node or no draw."""
        index = node + 1  # the first draw follows the text
        token = self._draws[index] if 0 <= index < len(self._draws) else -1
        return token if token >= 0 else None
