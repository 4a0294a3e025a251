"""Terminal output of an answer: text without control characters, and drafts by pass."""

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text
from rich.tree import Tree

from foreword.engine.messages import AnswerDelta, DraftShown
from foreword.engine.text import TokenTexts
from foreword.models.tokenization.tokenizer import Tokenizer

_ALLOWED_CONTROLS = "\n\t"


@dataclass(frozen=True)
class TextPiece:
    """Text completed by one token."""

    text: str
    drafted: bool  # an accepted draft token; otherwise sampled by the target


class PieceReader:
    """Splits the deltas of one answer into pieces; joined, they are the deltas' text.

    A character of several tokens belongs to the last of them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._texts = TokenTexts(tokenizer)

    def read(self, delta: AnswerDelta) -> Iterator[TextPiece]:
        """Yield the pieces of the next delta; an end token has none."""
        for place, text in enumerate(self._texts.pieces(delta)):
            if text:
                yield TextPiece(text, drafted=place < delta.from_draft)


def visible(text: str) -> str:
    """Return the text without control characters except newline and tab."""
    return "".join(
        character
        for character in text
        if character in _ALLOWED_CONTROLS or unicodedata.category(character) != "Cc"
    )


ACCEPTED_STYLE, REJECTED_STYLE = "dodger_blue1", "dim strike"

TokenText = Callable[[int], str]


def shown_passes(drafts: Sequence[DraftShown], first: int, text_of: TokenText) -> tuple[RenderableType, ...]:
    """Return passes with drafts, numbered from `first` on; accepted tokens are blue, rejected ones struck out."""
    return tuple(
        _shown(f"pass {first + place}: ", draft, text_of)
        for place, draft in enumerate(drafts)
        if draft.tokens
    )


def _shown(title: str, draft: DraftShown, text_of: TokenText) -> RenderableType:
    accepted = set(draft.accepted)

    def cell(node: int) -> Text:
        style = ACCEPTED_STYLE if node in accepted else REJECTED_STYLE
        return Text(_quoted(text_of(draft.tokens[node])), style)

    if len(set(draft.parents)) == len(draft.parents):
        line = Text(title)
        for node in range(len(draft.tokens)):
            line.append_text(cell(node)).append(" ")
        return line
    root = Tree(Text(title.strip()))
    branches = {-1: root}
    for node, parent in enumerate(draft.parents):
        branches[node] = branches[parent].add(cell(node))
    return root


def _quoted(text: str) -> str:
    """Return a token's text with visible spaces and line ends."""
    return visible(text).replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") or "∅"
