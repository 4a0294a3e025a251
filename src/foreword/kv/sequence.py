"""The KV rows of one request: sequence, pending row moves, sliding window, and consistency checks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.kv.block_pool import BlockPool
from foreword.kv.chunks import Chunk
from foreword.kv.extra_rows import ExtraRows
from foreword.kv.prefix_cache import PrefixCache, PrefixNode

MOST_PASSES = 2
"""Maximum passes in flight for one sequence."""

GONE = -1
"""Table entry of a released page, which lies before the window of all layers."""


@dataclass(eq=False)
class KvSequence:
    """The KV rows of one request: `computed` committed ones, then provisional ones up to `reserved`.

    A pass without draft tokens commits all its rows whatever it draws: it is `foreseen`, so that another pass may be
    laid out before it ends.
    """

    pages: list[int] = field(default_factory=list)  # physical pages in logical order
    computed: int = 0  # rows [0, computed) are committed
    reserved: int = 0  # rows [computed, reserved) may be written by passes in flight
    tenant: str = ""  # owner whose published pages it may share
    chain: list[PrefixNode] = field(default_factory=list)  # published pages that it starts with
    publishes: bool = False  # whether its full pages may still be published
    passes: int = 0  # passes in flight
    ahead: int = 0  # rows after `computed` that passes in flight are certain to commit
    is_foreseen: bool = False  # whether the committed rows of the newest pass are known in advance
    losses: int = 0  # failed passes that voided later ones, plus one when closed
    extra: dict[str, ExtraRows] = field(default_factory=dict)  # rows of drafters in its pages, by name
    # States of recurrent layers: the current chunk, then those that passes in flight enter. Empty: there are none.
    chunks: list[Chunk] = field(default_factory=list)
    has_prompt_state: bool = False  # the last state of its prompt was kept as a checkpoint

    @property
    def begin(self) -> int:
        """First row of the next pass."""
        return self.computed + self.ahead

    @property
    def awaits_pass(self) -> bool:
        """Return whether the next pass must wait for one in flight."""
        return self.passes > 0 and not (self.is_foreseen and self.passes < MOST_PASSES)

    def begin_pass(self) -> None:
        """Start a pass. No other may start until it has ended, unless `foresee` is called."""
        self.passes += 1
        self.is_foreseen = False

    def foresee(self, rows: int) -> None:
        """Declare that the newest pass commits exactly its first `rows` rows."""
        self.ahead += rows
        self.is_foreseen = True

    def end_pass(self) -> None:
        """End the oldest pass, or one that could not be launched."""
        self.passes -= 1

    @property
    def own_pages(self) -> list[int]:
        """Pages held by it alone: not published, not released."""
        return [page for page in self.pages[self.published :] if page != GONE]

    @property
    def published(self) -> int:
        return len(self.chain)

    def rows_of(self, name: str, state_offset: int = 0) -> ExtraRows:
        """Return a drafter's rows, of which the first `state_offset` do not exist."""
        rows = self.extra.get(name)
        if rows is None:
            rows = self.extra[name] = ExtraRows(name)
        rows.end = max(rows.end, state_offset)
        return rows


@dataclass(frozen=True)
class RowMove:
    """A committed row that is still where the last pass wrote it; the next pass moves it first."""

    owner: KvSequence
    source: int  # physical row
    row: int  # logical row of the owner
    ring_source: int | None = None  # physical row of a ring; None: no recurrent layers


_Moves = dict[KvSequence, list[RowMove]]
"""Per owner, rows ascending."""


class RowMoves:
    """Moves waiting for the next pass, and moves being executed by passes in flight."""

    def __init__(self) -> None:
        self._pending: _Moves = {}
        self._moving: _Moves = {}

    @property
    def pending(self) -> tuple[RowMove, ...]:
        return tuple(move for moves in self._pending.values() for move in moves)

    def add(self, owner: KvSequence, source: tuple[int, int | None], row: int) -> None:
        """Add a move of the owner's `row` from physical rows of a page and a ring; rows are ascending."""
        self._pending.setdefault(owner, []).append(RowMove(owner, source[0], row, source[1]))

    def sources(self, owner: KvSequence) -> dict[int, tuple[int, int | None]]:
        """Return logical row -> physical rows of the owner's pending moves."""
        return {move.row: (move.source, move.ring_source) for move in self._pending.get(owner, ())}

    def take(self) -> list[RowMove]:
        """Hand all moves of all owners to a pass, since it may write the pages they come from."""
        moves = list(self.pending)
        self._moving |= self._pending
        self._pending.clear()
        return moves

    def settle(self, moves: Sequence[RowMove]) -> None:
        for move in moves:
            self._moving.pop(move.owner, None)

    def first_moving(self, owner: KvSequence) -> int | None:
        """Return the first row that a pass in flight moves; None: none."""
        moves = self._moving.get(owner)
        return moves[0].row if moves else None

    def settled(self, owner: KvSequence) -> int:
        """Return the number of leading computed rows that are in place."""
        if not self._pending and not self._moving:
            return owner.computed
        waiting = (moves[0].row for moves in (self._pending.get(owner), self._moving.get(owner)) if moves)
        return min(waiting, default=owner.computed)

    def cut(self, owner: KvSequence, rows: int) -> None:
        """Drop pending moves of rows from `rows` on."""
        kept = [move for move in self._pending.pop(owner, ()) if move.row < rows]
        if kept:
            self._pending[owner] = kept

    def forget(self, owner: KvSequence) -> None:
        self._pending.pop(owner, None)
        self._moving.pop(owner, None)

    def check_integrity(self, owners: set[KvSequence]) -> None:
        """Raise `AssertionError` if a move has no owner, concerns an uncomputed row, or is out of order."""
        for owner, moves in [*self._pending.items(), *self._moving.items()]:
            rows = [move.row for move in moves]
            if owner not in owners or not rows or rows[-1] >= owner.computed:
                raise AssertionError(f"a pending move has no owner: {moves}")
            if rows != sorted(rows) or any(move.owner is not owner for move in moves):
                raise AssertionError(f"pending moves are out of order: {moves}")


REWOUND = 128
"""Margin of rows that a sequence may lose again if moves are lost: more than a step commits."""


class Window:
    """Releases the pages before a sequence's newest `rows` rows; None keeps everything.

    Published pages stay with their users, so publishing ends with the first window: a text holds at most two windows,
    and prefix hits cover the first. A sequence with drafter rows, which have no window, keeps its pages.
    """

    def __init__(self, rows: int | None, page_size: int) -> None:
        self._rows = rows
        self._page_size = page_size

    def publishable(self, pages: int) -> int:
        """Return how many of the first `pages` pages may be published."""
        return pages if self._rows is None else min(pages, self._rows // self._page_size)

    def holds(self, sequence: KvSequence, rows: int) -> bool:
        """Return whether all rows visible after the first `rows` rows are present."""
        if self._rows is None:
            return True
        first = max(0, rows - self._rows) // self._page_size
        return GONE not in sequence.pages[first : -(-rows // self._page_size)]

    def release_unread(self, pool: BlockPool, sequence: KvSequence) -> None:
        if self._rows is None or sequence.extra:
            return
        unread = (sequence.computed - self._rows - REWOUND) // self._page_size
        for place in range(unread - 1, sequence.published - 1, -1):
            if sequence.pages[place] == GONE:  # and all before it
                return
            pool.release([sequence.pages[place]])
            sequence.pages[place] = GONE


def publish_pages(
    sequence: KvSequence,
    tokens: Sequence[int],
    full: int,
    prefix: PrefixCache,
    pool: BlockPool,
    page_size: int,
) -> None:
    """Publish the sequence's first `full` pages, or adopt those that are published already with the same text."""
    for position in range(sequence.published, full):
        first = position * page_size
        text = tuple(tokens[first : first + page_size])
        parent, page = sequence.chain[-1] if position else sequence.tenant, sequence.pages[position]
        if page == GONE:
            return
        node = prefix.find(parent, text)
        adopted = node is not None
        if node is not None:
            prefix.hold([node])
            pool.release([page])
            sequence.pages[position] = node.page
        elif pool.is_shared(page):
            return
        else:
            node = prefix.add(parent, text, page)
        sequence.chain.append(node)
        for kind in sequence.extra.values():
            if adopted:
                kind.adopt(sequence.chain)
            kind.mark(sequence.chain)


def check_sequences(
    sequences: set[KvSequence], pool: BlockPool, prefix: PrefixCache, moves: RowMoves, page_size: int
) -> None:
    """Raise `AssertionError` if pages, tables, lengths, moves or published pages are inconsistent."""
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
    """Check that the published pages of a sequence are its first ones, committed, and one chain of its tenant."""
    parents = [sequence.tenant, *sequence.chain]
    for parent, node, page in zip(parents, sequence.chain, sequence.pages, strict=False):
        if node.parent != parent or node.page != page or prefix.find(parent, node.tokens) is not node:
            raise AssertionError(f"a table and its published chain differ: {sequence}")
    if published & set(sequence.pages[sequence.published :]):
        raise AssertionError(f"a published page lies outside the chain: {sequence}")
