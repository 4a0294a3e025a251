"""Drafts of full size, whatever is guessed: for passes that are only run so that others find them ready."""

from collections.abc import Sequence

from foreword.speculation.draft import ROOT, Draft
from foreword.speculation.drafting import Ask, Drafter, DraftRequest


class FullDrafts:
    """A drafter that needs nothing but the text; where it has little to say, any tokens stand for its guesses."""

    def __init__(self, drafter: Drafter | None, *, branches: bool = False) -> None:
        """With `branches` what stands for its guesses is no chain; None: nobody is asked, all are made up."""
        self._drafter = drafter
        self._branches = branches

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        found = [Draft()] * len(asks) if self._drafter is None else self._drafter.propose(asks)
        return [self._filled(draft, ask) for draft, ask in zip(found, asks, strict=True)]

    def forget(self, request: DraftRequest) -> None:
        if self._drafter is not None:
            self._drafter.forget(request)

    def _filled(self, draft: Draft, ask: Ask) -> Draft:
        depth = min(ask.max_nodes, ask.max_depth)
        if draft.device is not None or (len(draft) >= depth and draft.is_chain is not self._branches):
            return draft
        now = len(ask.request.tokens), ask.request.epoch
        if not self._branches:
            return Draft.chain([0] * depth, *now)
        depth = min(depth, ask.max_nodes - 1)
        more = ask.max_nodes - depth
        return Draft((*[0] * depth, *range(1, 1 + more)), (*range(ROOT, depth + ROOT), *[ROOT] * more), *now)
