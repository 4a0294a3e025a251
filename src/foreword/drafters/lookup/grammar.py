"""Follows the form that an answer must have, where it leaves no choice."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Ask, DraftRequest


@dataclass(frozen=True)
class GrammarConfig:
    """Nothing to set."""


class GrammarDrafter:
    """Guesses the tokens that must come: the keys of a schema, what stands between them, and the end.

    They are judged as any guess is; that the target has no choice either is what its masks say.
    """

    acceptance_by_level = (0.97,) * 16
    """What must come is drawn all but always: a stop text or the last of `max_tokens` may end the answer before it."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """A chain for every ask whose answer goes on in one way only."""
        return [_forced(ask) for ask in asks]

    def forget(self, request: DraftRequest) -> None:
        """Nothing is kept."""


def _forced(ask: Ask) -> Draft:
    grammar = ask.request.sampling.grammar
    tokens = () if grammar is None else grammar.forced(min(ask.max_nodes, ask.max_depth))
    return Draft.chain(tokens, len(ask.request.tokens), ask.request.epoch)
