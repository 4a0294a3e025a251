"""The KV rows of one request."""

from dataclasses import dataclass, field

from foreword.kv.extra_rows import ExtraRows
from foreword.kv.prefix_cache import PrefixNode


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
    losses: int = 0  # passes that failed, and took with them those laid out after
    extra: dict[str, ExtraRows] = field(default_factory=dict)  # rows of drafters in its pages, by kind

    @property
    def begin(self) -> int:
        """The row at which the next pass begins."""
        return self.computed + self.ahead

    @property
    def published(self) -> int:
        """How many of its pages, from the first on, are published."""
        return len(self.chain)

    def rows_of(self, name: str, lag: int = 0) -> ExtraRows:
        """What it has of one kind of extra rows, of which the first `lag` do not exist."""
        if name not in self.extra:
            self.extra[name] = ExtraRows(name)
        rows = self.extra[name]
        rows.end = max(rows.end, lag)
        return rows


@dataclass(frozen=True)
class RowMove:
    """A final row that still lies where the last pass wrote it; the next pass moves it first."""

    owner: KvSequence
    source: int  # physical row
    row: int  # logical row of the owner
