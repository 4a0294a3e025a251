"""Final rows that still lie where a pass wrote them."""

from collections.abc import Sequence

from foreword.kv.sequence import KvSequence, RowMove

_Moves = dict[KvSequence, list[RowMove]]
"""Per owner, rows ascending."""


class RowMoves:
    """Moves that wait for the next pass, and those that a pass under way does."""

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
        """The first row that a pass under way moves; None: it moves none."""
        moves = self._moving.get(owner)
        return moves[0].row if moves else None

    def is_moving(self, owner: KvSequence) -> bool:
        """Whether a pass under way moves rows of it."""
        return owner in self._moving

    def settled(self, owner: KvSequence) -> int:
        """Computed rows before the first one that is not known to be in its place."""
        if not self._pending and not self._moving:
            return owner.computed
        waiting = (moves[0].row for moves in (self._pending.get(owner), self._moving.get(owner)) if moves)
        return min(waiting, default=owner.computed)

    def cut(self, owner: KvSequence, rows: int) -> None:
        """Forget the waiting moves of all but the first `rows` rows."""
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
