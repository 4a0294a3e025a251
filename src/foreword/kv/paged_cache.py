"""Per-request block tables with provisional rows behind the computed end."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.kv.block_pool import BlockPool

PAGE_SIZE = 16
"""KV rows in one page."""


@dataclass(eq=False)
class KvSequence:
    """The KV rows of one request: `computed` finished ones, then provisional ones up to `reserved`."""

    pages: list[int] = field(default_factory=list)  # physical pages in logical order
    computed: int = 0  # rows [0, computed) are final
    reserved: int = 0  # rows [computed, reserved) may be written by the pass under way


@dataclass(frozen=True)
class RowMove:
    """A final row that still lies where the last pass wrote it; the next pass moves it first."""

    owner: KvSequence
    source: int  # physical row
    row: int  # logical row of the owner


class PagedCache:
    """Bookkeeping of all KV memory: reserve rows for a pass, then commit a path through them or roll back.

    It never touches the KV bytes: a pass writes rows where it is told to, and moves rows that a commit
    left pending before it does anything else. Pages freed by a commit may therefore still be the source
    of a pending move; nobody writes them before that move is done.
    """

    def __init__(self, num_pages: int, page_size: int = PAGE_SIZE) -> None:
        self.page_size = page_size
        self.pool = BlockPool(num_pages)
        self._sequences: set[KvSequence] = set()
        self._pending: list[RowMove] = []

    def open(self) -> KvSequence:
        """A new sequence without rows."""
        sequence = KvSequence()
        self._sequences.add(sequence)
        return sequence

    def close(self, sequence: KvSequence) -> None:
        """Forget a sequence and give its pages back."""
        self._sequences.remove(sequence)
        self._pending = [move for move in self._pending if move.owner is not sequence]
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.computed = sequence.reserved = 0

    def fork(self, sequence: KvSequence) -> KvSequence:
        """A second sequence with the same computed rows: full pages are shared, the rest is copied.

        A page that still waits for a move is not shared: if that move is lost, each sequence has to
        compute its row again by itself.
        """
        moved = {move.row: move.source for move in self._pending if move.owner is sequence}
        shared = min([sequence.computed, *moved]) // self.page_size
        own = self.pool.allocate(self.pages_for(sequence.computed) - shared)
        self.pool.share(sequence.pages[:shared])
        copy = KvSequence(sequence.pages[:shared] + own, sequence.computed, sequence.computed)
        self._sequences.add(copy)
        for row in range(shared * self.page_size, sequence.computed):
            source = moved.get(row, self.slot(sequence, row))
            self._pending.append(RowMove(copy, source, row))
        return copy

    def pages_for(self, rows: int) -> int:
        """Pages that hold `rows` rows."""
        return -(-rows // self.page_size)

    def reserve(self, sequence: KvSequence, rows: int) -> None:
        """Make room for `rows` rows behind the computed end, or raise `OutOfPages` and change nothing."""
        needed = self.pages_for(sequence.computed + rows) - len(sequence.pages)
        if needed > 0:
            sequence.pages += self.pool.allocate(needed)
        sequence.reserved = sequence.computed + rows
        first_written = sequence.computed // self.page_size
        if any(self.pool.is_shared(page) for page in sequence.pages[first_written:]):
            raise AssertionError("a shared page would be written")

    def slot(self, sequence: KvSequence, row: int) -> int:
        """Physical row of a logical one."""
        return sequence.pages[row // self.page_size] * self.page_size + row % self.page_size

    def commit(self, sequence: KvSequence, run: int, path: Sequence[int]) -> None:
        """Make final the first `run` reserved rows and, of those behind them, the ones named by `path`.

        `path` counts from the end of the run, ascending. What is not on it never happened.
        """
        base = sequence.computed + run
        if base + (path[-1] + 1 if path else 0) > sequence.reserved:
            raise ValueError("more rows are committed than were reserved")
        for step, node in enumerate(path):
            if node != step:
                self._pending.append(RowMove(sequence, self.slot(sequence, base + node), base + step))
        sequence.computed = base + len(path)
        self.rollback(sequence)

    def advance(self, sequence: KvSequence, rows: int) -> None:
        """Make the first `rows` reserved rows final and keep the others reserved."""
        if sequence.computed + rows > sequence.reserved:
            raise ValueError("more rows are committed than were reserved")
        sequence.computed += rows

    def rewind(self, sequence: KvSequence, rows: int) -> None:
        """Keep at most the first `rows` computed rows; the others have to be computed again."""
        self._pending = [m for m in self._pending if m.owner is not sequence or m.row < rows]
        sequence.computed = min(sequence.computed, rows)
        self.rollback(sequence)

    def rollback(self, sequence: KvSequence) -> None:
        """Drop all provisional rows and the pages that only they needed. Safe to repeat."""
        sequence.reserved = sequence.computed
        keep = self.pages_for(sequence.computed)
        self.pool.release(sequence.pages[keep:])
        del sequence.pages[keep:]

    @property
    def pending_moves(self) -> tuple[RowMove, ...]:
        """Moves that the next pass has to do."""
        return tuple(self._pending)

    def take_moves(self) -> list[RowMove]:
        """Hand the pending moves to the pass that does them."""
        moves, self._pending = self._pending, []
        return moves

    def lose_moves(self, moves: Sequence[RowMove]) -> None:
        """A pass failed with these moves: which were done is unknown, so their rows count as not computed."""
        for move in moves:
            if move.owner in self._sequences:
                self.rewind(move.owner, move.row)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if pages, tables, lengths or pending moves contradict each other."""
        self.pool.check_integrity(sequence.pages for sequence in self._sequences)
        for sequence in self._sequences:
            if not 0 <= sequence.computed <= sequence.reserved <= len(sequence.pages) * self.page_size:
                raise AssertionError(f"lengths out of order: {sequence}")
        for move in self._pending:
            if move.owner not in self._sequences or move.row >= move.owner.computed:
                raise AssertionError(f"a pending move has no owner: {move}")
