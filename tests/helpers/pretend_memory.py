"""KV memory of plain values in which a pass moves and writes rows as the real one would."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foreword.kv.paged_cache import PagedCache
from foreword.kv.sequence import KvSequence, RowMove


@dataclass(frozen=True)
class PretendPass:
    """A pass under way: where it moves and writes is fixed, whatever happens to its sequences meanwhile."""

    sequences: tuple[KvSequence, ...]
    moves: list[RowMove]
    copies: list[tuple[int, int]]  # (from, to) physical rows
    writes: dict[int, object]  # per physical row


class PretendMemory:
    """Physical KV rows as values."""

    def __init__(self, cache: PagedCache) -> None:
        self.cache = cache
        self.rows: dict[int, object] = {}

    def launch(self, writes: Mapping[KvSequence, Sequence[object]]) -> PretendPass:
        """Take the pending moves, and what goes into each sequence's reserved rows."""
        moves = self.cache.take_moves()
        copies = [(move.source, self.cache.slot(move.owner, move.row)) for move in moves]
        slots = {
            self.cache.slot(sequence, sequence.computed + offset): value
            for sequence, values in writes.items()
            for offset, value in enumerate(values)
        }
        return PretendPass(tuple(writes), moves, copies, slots)

    def resolve(self, under_way: PretendPass, *, fail: bool = False) -> None:
        """Do the moves all at once, then the writes. A failing pass does only half of its moves."""
        copies = under_way.copies[: len(under_way.copies) // 2] if fail else under_way.copies
        self.rows.update([(target, self.rows[source]) for source, target in copies])
        self.rows.update(under_way.writes)
        if fail:
            for sequence in under_way.sequences:
                self.cache.rollback(sequence)
            self.cache.lose_moves(under_way.moves)
        else:
            self.cache.settle_moves(under_way.moves)

    def run_pass(self, writes: Mapping[KvSequence, Sequence[object]], *, fail: bool = False) -> None:
        """Both halves at once."""
        self.resolve(self.launch(writes), fail=fail)

    def computed_rows(self, sequence: KvSequence) -> list[object]:
        """What the next pass would see of a sequence first: every computed row, after the pending moves."""
        moved = {move.row: move.source for move in self.cache.pending_moves if move.owner is sequence}
        return [self.rows[moved.get(row, self.cache.slot(sequence, row))] for row in range(sequence.computed)]
