"""The passes that a stream's new tokens are from, in words."""

from msgspec import Struct

from foreword.engine.messages import AnswerDelta
from foreword.engine.text import token_text
from foreword.models.tokenization.tokenizer import Tokenizer


class PassShown(Struct, frozen=True):
    """One target pass: the guesses that it judged, as a tree, and what came of them."""

    gained: int  # tokens, from the event's first on: accepted guesses, then one of the target's own
    guesses: list[str]  # [nodes], each token's text by itself
    parents: tuple[int, ...]  # [nodes], index of an earlier node, or -1 after the text
    accepted: tuple[int, ...]  # nodes whose tokens are part of the answer, first to last


def passes_of(tokenizer: Tokenizer, delta: AnswerDelta) -> list[PassShown]:
    """One per pass; where a stream is split into single tokens, the first of a pass has it."""
    return [
        PassShown(
            draft.gained,
            [token_text(tokenizer, token) for token in draft.tokens],
            draft.parents,
            draft.accepted,
        )
        for draft in delta.drafts
    ]
