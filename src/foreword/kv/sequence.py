"""The KV rows of one request: its sequence, pending row moves, sliding window, and what must hold of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.kv.block_pool import BlockPool
from foreword.kv.extra_rows import ExtraRows
from foreword.kv.prefix_cache import PrefixCache, PrefixNode

MOST_PASSES = 2
"""Most passes in flight for one sequence."""

GONE = -1
"""Stands in a table for a page that was given back: it lies before the window of all layers."""


@dataclass(eq=False)
class KvSequence:
    """The KV rows of one request: `computed` finished ones, then provisional ones up to `reserved`.

    A pass without draft tokens makes its rows final whatever it draws: it is `foreseen`, and another may be laid out
    after it before it has ended.
    """

    pages: list[int] = field(default_factory=list)  # physical pages in logical order
    computed: int = 0  # rows [0, computed) are final
    reserved: int = 0  # rows [computed, reserved) may be written by passes in flight
    tenant: str = ""  # whose published pages it may share
    chain: list[PrefixNode] = field(default_factory=list)  # the published pages that it starts with
    publishes: bool = False  # whether its full pages may still be published
    passes: int = 0  # in flight, which may write its reserved rows
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
        """Whether the next pass cannot be laid out before one in flight has ended."""
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


_Moves = dict[KvSequence, list[RowMove]]
"""Per owner, rows ascending."""


class RowMoves:
    """Moves that wait for the next pass, and those that a pass in flight does."""

    def __init__(self) -> None:
        self._pending: _Moves = {}
        self._moving: _Moves = {}

    @property
    def pending(self) -> tuple[RowMove, ...]:
        """Moves that the next pass has to do."""
        return tuple(move for moves in self._pending.values() for move in moves)

    def add(self, owner: KvSequence, source: int, row: int) -> None:
        """A row of the owner that lies at the physical row `source`; rows come in rising order."""
        self._pending.setdefault(owner, []).append(RowMove(owner, source, row))

    def sources(self, owner: KvSequence) -> dict[int, int]:
        """Row -> where it lies, of the owner's rows that wait."""
        return {move.row: move.source for move in self._pending.get(owner, ())}

    def take(self) -> list[RowMove]:
        """Hand all to a pass, whosever they are: it may write the pages that they come from."""
        moves = list(self.pending)
        self._moving |= self._pending
        self._pending.clear()
        return moves

    def settle(self, moves: Sequence[RowMove]) -> None:
        """The pass that did these has ended."""
        for move in moves:
            self._moving.pop(move.owner, None)

    def first_moving(self, owner: KvSequence) -> int | None:
        """Return the first row that a pass in flight moves; None: it moves none."""
        moves = self._moving.get(owner)
        return moves[0].row if moves else None

    def is_moving(self, owner: KvSequence) -> bool:
        """Whether a pass in flight moves rows of it."""
        return owner in self._moving

    def settled(self, owner: KvSequence) -> int:
        """Computed rows before the first one that is not known to be in its place."""
        if not self._pending and not self._moving:
            return owner.computed
        waiting = (moves[0].row for moves in (self._pending.get(owner), self._moving.get(owner)) if moves)
        return min(waiting, default=owner.computed)

    def cut(self, owner: KvSequence, rows: int) -> None:
        """Keep only the waiting moves of the first `rows` rows."""
        kept = [move for move in self._pending.pop(owner, ()) if move.row < rows]
        if kept:
            self._pending[owner] = kept

    def forget(self, owner: KvSequence) -> None:
        self._pending.pop(owner, None)
        self._moving.pop(owner, None)

    def check_integrity(self, owners: set[KvSequence]) -> None:
        """Raise `AssertionError` if a move has no owner, is of a row that is not computed, or out of order."""
        for owner, moves in [*self._pending.items(), *self._moving.items()]:
            rows = [move.row for move in moves]
            if owner not in owners or not rows or rows[-1] >= owner.computed:
                raise AssertionError(f"a pending move has no owner: {moves}")
            if rows != sorted(rows) or any(move.owner is not owner for move in moves):
                raise AssertionError(f"pending moves are out of order: {moves}")


REWOUND = 128
"""Rows that a text may lose again, if moves are lost: more than a step commits at once."""


class Window:
    """Gives back the pages of sequences before their newest `rows` rows; with None it keeps everything.

    Pages that are published stay with their users, so that publishing ends with the first window: a text holds no
    more than two windows, and prefix hits are found for the first of them. A sequence with rows of drafters, which have
    no window, keeps its pages.
    """

    def __init__(self, rows: int | None, page_size: int) -> None:
        self._rows = rows
        self._page_size = page_size

    def publishable(self, pages: int) -> int:
        """How many of the first `pages` pages may be published."""
        return pages if self._rows is None else min(pages, self._rows // self._page_size)

    def holds(self, sequence: KvSequence, rows: int) -> bool:
        """Whether the rows that the one after the first `rows` sees are all there."""
        if self._rows is None:
            return True
        first = max(0, rows - self._rows) // self._page_size
        return GONE not in sequence.pages[first : -(-rows // self._page_size)]

    def give_back(self, pool: BlockPool, sequence: KvSequence) -> None:
        if self._rows is None or sequence.extra:
            return
        unread = (sequence.computed - self._rows - REWOUND) // self._page_size
        for place in range(unread - 1, sequence.published - 1, -1):
            if sequence.pages[place] == GONE:  # and so are those before it
                return
            pool.release([sequence.pages[place]])
            sequence.pages[place] = GONE


def check_sequences(
    sequences: set[KvSequence], pool: BlockPool, prefix: PrefixCache, moves: RowMoves, page_size: int
) -> None:
    """Raise `AssertionError` if pages, tables, lengths, moves or published pages contradict each other."""
    published = prefix.published_pages()
    chains = ([node.page for node in sequence.chain] for sequence in sequences)
    pool.check_integrity([*chains, *(sequence.own_pages for sequence in sequences), published])
    prefix.check_integrity()
    moves.check_integrity(sequences)
    for sequence in sequences:
        room = len(sequence.pages) * page_size
        if not 0 <= sequence.computed <= sequence.begin <= sequence.reserved <= room:
            raise AssertionError(f"lengths out of order: {sequence}")
        if sequence.published * page_size > moves.settled(sequence):
            raise AssertionError(f"rows are published that are not finished: {sequence}")
        _check_chain(sequence, prefix, set(published))


def _check_chain(sequence: KvSequence, prefix: PrefixCache, published: set[int]) -> None:
    """The published pages of a sequence are its first ones, finished, and one chain of its tenant."""
    parents = [sequence.tenant, *sequence.chain]
    for parent, node, page in zip(parents, sequence.chain, sequence.pages, strict=False):
        if node.parent != parent or node.page != page or prefix.find(parent, node.tokens) is not node:
            raise AssertionError(f"a table and its published chain differ: {sequence}")
    if published & set(sequence.pages[sequence.published :]):
        raise AssertionError(f"a published page lies outside the chain: {sequence}")
