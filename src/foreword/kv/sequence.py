"""The KV rows of one request."""

from dataclasses import dataclass, field

from foreword.kv.extra_rows import ExtraRows
from foreword.kv.prefix_cache import PrefixNode

MOST_PASSES = 2
"""Passes that are under way for one sequence."""

GONE = -1
"""Stands in a table for a page that was given back: it lies before the window of all layers."""


@dataclass(eq=False)
class KvSequence:
    """The KV rows of one request: `computed` finished ones, then provisional ones up to `reserved`.

    A pass without guesses makes its rows final whatever it finds out: it is `foreseen`, and another may be laid out
    after it before it has ended.
    """

    pages: list[int] = field(default_factory=list)  # physical pages in logical order
    computed: int = 0  # rows [0, computed) are final
    reserved: int = 0  # rows [computed, reserved) may be written by passes under way
    tenant: str = ""  # whose published pages it may share
    chain: list[PrefixNode] = field(default_factory=list)  # the published pages that it starts with
    publishes: bool = False  # whether its full pages may still be published
    passes: int = 0  # under way, which may write its reserved rows
    ahead: int = 0  # rows after the computed ones that these will make final, as far as that is foreseen
    is_foreseen: bool = False  # of the newest of them, how many rows it makes final
    losses: int = 0  # passes that failed and took with them those laid out after; and one when it is closed
    extra: dict[str, ExtraRows] = field(default_factory=dict)  # rows of drafters in its pages, by kind

    @property
    def begin(self) -> int:
        """The row at which the next pass begins."""
        return self.computed + self.ahead

    @property
    def awaits_pass(self) -> bool:
        """Whether the next pass cannot be laid out before one that is under way has ended."""
        return self.passes > 0 and not (self.is_foreseen and self.passes < MOST_PASSES)

    def begin_pass(self) -> None:
        """No other may begin until this one has ended, unless `foresee` says how it will."""
        self.passes += 1
        self.is_foreseen = False

    def foresee(self, rows: int) -> None:
        """The pass that was begun last makes its first `rows` rows final and no others, whatever it finds out."""
        self.ahead += rows
        self.is_foreseen = True

    def end_pass(self) -> None:
        """The oldest pass is done, or could not be launched."""
        self.passes -= 1

    @property
    def own_pages(self) -> list[int]:
        """Pages that it holds by itself: not those of its published chain, nor those that it gave back."""
        return [page for page in self.pages[self.published :] if page != GONE]

    @property
    def published(self) -> int:
        """How many of its pages, from the first on, are published."""
        return len(self.chain)

    def rows_of(self, name: str, lag: int = 0) -> ExtraRows:
        """What it has of one kind of extra rows, of which the first `lag` do not exist."""
        rows = self.extra.get(name)
        if rows is None:
            rows = self.extra[name] = ExtraRows(name)
        rows.end = max(rows.end, lag)
        return rows


@dataclass(frozen=True)
class RowMove:
    """A final row that still lies where the last pass wrote it; the next pass moves it first."""

    owner: KvSequence
    source: int  # physical row
    row: int  # logical row of the owner
