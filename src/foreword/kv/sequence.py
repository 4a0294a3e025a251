"""The KV rows of one request: its sequence, pending row moves, sliding window, and consistency checks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.kv.block_pool import BlockPool
from foreword.kv.chunks import Chunk
from foreword.kv.extra_rows import ExtraRows
from foreword.kv.prefix_cache import PrefixCache, PrefixNode

MOST_PASSES = 2
"""Maximum number of passes in flight over one sequence."""

FREED = -1
"""Entry of `KvSequence.pages` for a released page: one before the sliding window of all layers."""


@dataclass(eq=False)
class KvSequence:
    """The KV rows of one request: `computed` committed ones, then provisional ones up to `reserved`.

    A pass without draft tokens commits all its rows, whatever token it samples. Its commit is known in advance, so
    that another pass can be prepared before it ends.
    """

    pages: list[int] = field(default_factory=list)  # physical pages in logical order; FREED: no longer held
    computed: int = 0  # rows [0, computed) are committed
    reserved: int = 0  # rows [computed, reserved) may be written by passes in flight
    tenant: str = ""  # the tenant whose published pages it may share
    chain: list[PrefixNode] = field(default_factory=list)  # nodes of its leading published pages
    publishes: bool = False  # whether its full pages may still be published
    passes: int = 0  # passes in flight
    certain_rows: int = 0  # rows after `computed` that passes in flight are certain to commit
    is_commit_known: bool = False  # whether the committed rows of the newest pass are known in advance
    losses: int = 0  # number of events that made all passes in flight void: a failed pass, or closing
    extra: dict[str, ExtraRows] = field(default_factory=dict)  # rows of drafters in its pages, by name
    # Recurrent layers: the current chunk, then the chunks that passes in flight enter. Empty without such layers.
    chunks: list[Chunk] = field(default_factory=list)
    has_prompt_state: bool = False  # whether the last state of its prompt was offered as a checkpoint

    @property
    def begin(self) -> int:
        """First row of the next pass."""
        return self.computed + self.certain_rows

    @property
    def awaits_pass(self) -> bool:
        """Return whether the next pass must wait for one in flight."""
        return self.passes > 0 and not (self.is_commit_known and self.passes < MOST_PASSES)

    def begin_pass(self) -> None:
        """Start a pass. Until it has ended, no other pass may start unless `declare_commit` is called."""
        self.passes += 1
        self.is_commit_known = False

    def declare_commit(self, rows: int) -> None:
        """Declare that the newest pass will commit exactly its first `rows` rows."""
        self.certain_rows += rows
        self.is_commit_known = True

    def end_pass(self) -> None:
        """End the oldest pass, or one that could not be launched."""
        self.passes -= 1

    @property
    def own_pages(self) -> list[int]:
        """Pages after `chain` that are not released; a fork may hold them too."""
        return [page for page in self.pages[self.published :] if page != FREED]

    @property
    def published(self) -> int:
        """Number of its leading pages that are published."""
        return len(self.chain)

    def rows_of(self, name: str, state_offset: int = 0) -> ExtraRows:
        """Return a drafter's rows, created on first use; the first `state_offset` rows are never computed."""
        rows = self.extra.get(name)
        if rows is None:
            rows = self.extra[name] = ExtraRows(name)
        rows.end = max(rows.end, state_offset)
        return rows


@dataclass(frozen=True)
class RowMove:
    """A committed row that must be copied to its slot; the next pass begins with this copy."""

    owner: KvSequence
    source: int  # slot in which the last pass wrote the row
    row: int  # logical row of the owner
    ring_source: int | None = None  # slot in the rings from which the ring row is copied; None: no ring row


_Moves = dict[KvSequence, list[RowMove]]
"""By owner; the moves of an owner have ascending rows."""


class RowMoves:
    """Moves that wait for the next pass, and moves that a pass in flight executes."""

    def __init__(self) -> None:
        self._pending: _Moves = {}
        self._moving: _Moves = {}

    @property
    def pending(self) -> tuple[RowMove, ...]:
        return tuple(move for moves in self._pending.values() for move in moves)

    def add(self, owner: KvSequence, source: tuple[int, int | None], row: int) -> None:
        """Add a move of the owner's `row`, after the moves of earlier rows. `source`: slots in a page and in a ring."""
        self._pending.setdefault(owner, []).append(RowMove(owner, source[0], row, source[1]))

    def sources(self, owner: KvSequence) -> dict[int, tuple[int, int | None]]:
        """Return logical row -> (slot in a page, slot in a ring) of the owner's pending moves."""
        return {move.row: (move.source, move.ring_source) for move in self._pending.get(owner, ())}

    def take(self) -> list[RowMove]:
        """Hand the pending moves of all owners to a pass: it may overwrite pages from which any of them copies."""
        moves = list(self.pending)
        self._moving |= self._pending
        self._pending.clear()
        return moves

    def settle(self, moves: Sequence[RowMove]) -> None:
        """Forget moves whose pass has ended."""
        for move in moves:
            self._moving.pop(move.owner, None)

    def first_moving(self, owner: KvSequence) -> int | None:
        """Return the first of the owner's rows that a pass in flight moves, or None."""
        moves = self._moving.get(owner)
        return moves[0].row if moves else None

    def settled(self, owner: KvSequence) -> int:
        """Return how many of the owner's first computed rows are in their slots."""
        if not self._pending and not self._moving:
            return owner.computed
        moved = (moves[0].row for moves in (self._pending.get(owner), self._moving.get(owner)) if moves)
        return min(moved, default=owner.computed)

    def cut(self, owner: KvSequence, rows: int) -> None:
        """Drop the pending moves of row `rows` and later ones."""
        kept = [move for move in self._pending.pop(owner, ()) if move.row < rows]
        if kept:
            self._pending[owner] = kept

    def forget(self, owner: KvSequence) -> None:
        """Drop all moves of a closed sequence."""
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


REWIND_MARGIN = 128
"""Rows before the window that are kept, because a sequence loses the newest committed rows if their moves fail.

A step commits fewer rows than this.
"""


class Window:
    """A sliding window of the newest `rows` rows of a sequence (None: no window); releases the pages before it.

    A sequence keeps its published pages. Therefore only the pages of its first `rows` rows are published: a sequence
    holds at most two windows, and prefix hits end with the first. A sequence with drafter rows keeps all pages, because
    these rows have no window.
    """

    def __init__(self, rows: int | None, page_size: int) -> None:
        self._rows = rows
        self._page_size = page_size

    def publishable(self, pages: int) -> int:
        """Return how many of the first `pages` pages may be published."""
        return pages if self._rows is None else min(pages, self._rows // self._page_size)

    def holds(self, sequence: KvSequence, rows: int) -> bool:
        """Return whether the sequence still has all rows in the window of the row after its first `rows` rows."""
        if self._rows is None:
            return True
        first = max(0, rows - self._rows) // self._page_size
        return FREED not in sequence.pages[first : -(-rows // self._page_size)]

    def release_unread(self, pool: BlockPool, sequence: KvSequence) -> None:
        """Release the unpublished pages before the window and its margin."""
        if self._rows is None or sequence.extra:
            return
        unread = (sequence.computed - self._rows - REWIND_MARGIN) // self._page_size
        for index in range(unread - 1, sequence.published - 1, -1):
            if sequence.pages[index] == FREED:  # and so are all earlier ones
                return
            pool.release([sequence.pages[index]])
            sequence.pages[index] = FREED


def publish_pages(
    sequence: KvSequence,
    tokens: Sequence[int],
    full: int,
    prefix: PrefixCache,
    pool: BlockPool,
    page_size: int,
) -> None:
    """Publish the sequence's first `full` pages. Replace a page by the published one with the same text, if any.

    Stops at the first page that is released, or that a fork holds.
    """
    for index in range(sequence.published, full):
        first = index * page_size
        text = tuple(tokens[first : first + page_size])
        parent, page = sequence.chain[-1] if index else sequence.tenant, sequence.pages[index]
        if page == FREED:
            return
        node = prefix.find(parent, text)
        is_published = node is not None
        if node is not None:
            prefix.hold([node])
            pool.release([page])
            sequence.pages[index] = node.page
        elif pool.is_shared(page):
            return
        else:
            node = prefix.add(parent, text, page)
        sequence.chain.append(node)
        for rows in sequence.extra.values():
            if is_published:
                rows.adopt(sequence.chain)
            rows.mark(sequence.chain)


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
            raise AssertionError(f"lengths are out of order: {sequence}")
        if sequence.published * page_size > moves.settled(sequence):
            raise AssertionError(f"rows with a pending move are published: {sequence}")
        _check_chain(sequence, prefix, set(published))


def _check_chain(sequence: KvSequence, prefix: PrefixCache, published: set[int]) -> None:
    """Raise `AssertionError` unless the sequence's first pages are one chain of its tenant, and no later page is."""
    parents = [sequence.tenant, *sequence.chain]
    for parent, node, page in zip(parents, sequence.chain, sequence.pages, strict=False):
        if node.parent != parent or node.page != page or prefix.find(parent, node.tokens) is not node:
            raise AssertionError(f"the pages of a sequence differ from its published chain: {sequence}")
    if published & set(sequence.pages[sequence.published :]):
        raise AssertionError(f"a published page lies outside the chain: {sequence}")
