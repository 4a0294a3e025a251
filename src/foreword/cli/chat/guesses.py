"""Drafts of an answer, pass by pass: a line for a chain, a tree where it branches."""

from collections.abc import Callable, Sequence

from rich.console import RenderableType
from rich.text import Text
from rich.tree import Tree

from foreword.cli.chat.text import visible
from foreword.engine.messages import DraftShown

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
    """A token's text so that spaces and line ends can be seen."""
    return visible(text).replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") or "∅"
