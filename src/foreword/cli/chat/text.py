"""Terminal output of a chat: text without control characters, drafts by pass, statistics."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from foreword.bench.skeleton import optional
from foreword.cli.console import visible
from foreword.engine.messages import AnswerDelta, DraftShown, RequestStats
from foreword.engine.outputs import add_fields
from foreword.engine.text import TokenTexts
from foreword.models.tokenization.tokenizer import Tokenizer


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
        for index, text in enumerate(self._texts.pieces(delta)):
            if text:
                yield TextPiece(text, drafted=index < delta.from_draft)


ACCEPTED_STYLE, REJECTED_STYLE = "dodger_blue1", "dim strike"

TokenText = Callable[[int], str]


def shown_passes(drafts: Sequence[DraftShown], first: int, text_of: TokenText) -> tuple[RenderableType, ...]:
    """Return the drafts of passes, which are numbered from `first` on; accepted tokens are blue, others struck out."""
    return tuple(
        _shown_draft(f"pass {number}: ", draft, text_of)
        for number, draft in enumerate(drafts, first)
        if draft.tokens
    )


def _shown_draft(title: str, draft: DraftShown, text_of: TokenText) -> RenderableType:
    """Return a chain as a line, and other drafts as a tree."""
    accepted = set(draft.accepted)

    def cell(node: int) -> Text:
        style = ACCEPTED_STYLE if node in accepted else REJECTED_STYLE
        text = visible(text_of(draft.tokens[node]))
        return Text(text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") or "∅", style)

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


@dataclass(frozen=True)
class Tally(RequestStats):
    """Statistics of one answer, or the sum over a session. Decoding does not include the passes over the prompt."""

    answers: int = 0

    @staticmethod
    def of(stats: RequestStats) -> "Tally":
        return Tally(**vars(stats), answers=1)

    @property
    def decoded_tokens(self) -> int:
        return self.output_tokens - self.first_tokens

    @property
    def decode_passes(self) -> int:
        return self.passes - self.first_passes

    def __add__(self, other: "Tally") -> "Tally":
        return add_fields(self, other)

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens per pass while decoding; None before the first pass."""
        return self.decoded_tokens / self.decode_passes if self.decode_passes else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second while decoding; None before that took time."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds > 0 else None


def summary_line(tally: Tally, tokens_per_second: float | None) -> str:
    """Return an answer's statistics in one line, without prefill."""
    passes = ""
    if tally.decode_passes:
        counted = f"{tally.decoded_tokens} in {tally.decode_passes} after the prompt's"
        passes = f", {optional(tally.tokens_per_pass, '.2f')} per pass ({counted})"
    accepted = f", {tally.accepted} of {tally.drafted} draft tokens accepted" if tally.drafted else ""
    return (
        f"{tally.output_tokens} tokens{passes}{accepted}, {optional(tokens_per_second, '.1f')} tokens/s, "
        f"{tally.cached_tokens} of {tally.prompt_tokens} prompt tokens cached"
    )


def stats_table(last: Tally, session: Tally) -> Table:
    """Return a table of tokens, passes, acceptance and times, with a column for the answer and one for the session."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("last answer", f"session ({session.answers})"):
        table.add_column(name, justify="right", no_wrap=True)
    both = (last, session)
    table.add_row("tokens", *(str(tally.output_tokens) for tally in both))
    table.add_row("passes", *(str(tally.decode_passes) for tally in both))
    table.add_row("tokens per pass", *(optional(tally.tokens_per_pass, ".2f") for tally in both))
    table.add_row("tokens per second", *(optional(tally.tokens_per_second, ".1f") for tally in both))
    table.add_row("draft tokens accepted", *(_share(tally.accepted, tally.drafted) for tally in both))
    table.add_row("prompt tokens cached", *(_share(t.cached_tokens, t.prompt_tokens) for t in both))
    for stage in ("draft", "verify", "accept"):
        table.add_row(f"{stage} time", *(_stage_time(tally, stage) for tally in both))
    return table


def position_table(last: Tally, session: Tally) -> Table:
    """Return acceptance by position: the fraction accepted of the drafts that reach it."""
    table = Table(title="accepted by position", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("position", "last answer", f"session ({session.answers})"):
        table.add_column(name, justify="right", no_wrap=True)
    for index in range(len(session.drafted_per_position)):
        table.add_row(str(index + 1), *(_accepted_at(tally, index) for tally in (last, session)))
    return table


def _accepted_at(tally: Tally, index: int) -> str:
    if index >= len(tally.drafted_per_position):
        return "-"
    return _share(tally.accepted_per_position[index], tally.drafted_per_position[index])


def _stage_time(tally: Tally, stage: str) -> str:
    total = tally.draft_seconds + tally.verify_seconds + tally.accept_seconds
    seconds: float = getattr(tally, f"{stage}_seconds")
    return f"{1e3 * seconds:.0f} ms ({seconds / total:.0%})" if total > 0 else "-"


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.0%})" if whole else "-"
