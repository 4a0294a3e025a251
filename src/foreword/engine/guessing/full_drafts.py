"""Drafts of full size, whatever is guessed: for passes that are only run so that others find them ready."""

from collections.abc import Sequence

from foreword.speculation.draft import Draft, PendingDraft
from foreword.speculation.drafting import Ask, Drafter, DraftRequest


class FullDrafts:
    """A drafter that needs nothing but the text; where it has little to say, any tokens stand for its guesses."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        found = self._drafter.propose(asks)
        return [_filled(draft, ask) for draft, ask in zip(found, asks, strict=True)]

    def forget(self, request: DraftRequest) -> None:
        self._drafter.forget(request)


def _filled(draft: Draft, ask: Ask) -> Draft:
    if isinstance(draft, PendingDraft) or len(draft) >= min(ask.max_nodes, ask.max_depth):
        return draft
    tokens = [0] * min(ask.max_nodes, ask.max_depth)
    return Draft.chain(tokens, len(ask.request.tokens), ask.request.epoch)
