"""The text of an answer token by token, and text that is safe to show on a terminal."""

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from foreword.engine.messages import AnswerDelta
from foreword.engine.text import TokenTexts
from foreword.models.tokenization.tokenizer import Tokenizer

_ALLOWED_CONTROLS = "\n\t"


@dataclass(frozen=True)
class Piece:
    """Text that one token completed."""

    text: str
    guessed: bool  # an accepted draft token; otherwise sampled by the target


class PieceReader:
    """Cuts the deltas of one answer into pieces; joined, they are the deltas' text.

    A character that several tokens make up belongs to the last of them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._texts = TokenTexts(tokenizer)

    def read(self, delta: AnswerDelta) -> Iterator[Piece]:
        """The pieces of the next delta; the token that only ended the answer has none."""
        for place, text in enumerate(self._texts.pieces(delta)):
            if text:
                yield Piece(text, guessed=place < delta.from_draft)


def visible(text: str) -> str:
    """The text without control characters but newline and tab: nothing in it can steer a terminal."""
    return "".join(
        character
        for character in text
        if character in _ALLOWED_CONTROLS or unicodedata.category(character) != "Cc"
    )
