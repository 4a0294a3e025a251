"""KV rows of a drafter in a sequence's pages, and the hidden states from which its next rows are computed."""

from collections.abc import Sequence
from typing import NamedTuple

from foreword.kv.prefix_cache import PrefixNode
from foreword.kv.states import States, copied, stacked

KEPT_STATES = 64
"""Number of newest tokens whose hidden states are kept, so that a drafter can resume after a pause."""


class _StateSlice(NamedTuple):
    """Hidden states of positions [first, end), sliced only when read."""

    first: int
    end: int
    source: States  # [rows, numbers], a larger array or tensor with these states
    source_row: int  # its row with the states of position `first`

    def states(self, first: int, end: int) -> States:
        """Return the states of those positions in [first, end) that this slice has."""
        shift = self.source_row - self.first
        return self.source[max(first, self.first) + shift : min(end, self.end) + shift]


class ExtraRows:
    """KV rows of one drafter in a sequence, and hidden states of the target for its next rows.

    Rows [begin, end) are filled; `begin` is above 0 if the drafter joined late. Hidden states are present for
    positions [states_begin, states_end).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.begin = 0
        self.end = 0
        self._states: list[_StateSlice] = []  # of consecutive positions
        self._marked = 0  # leading published pages whose node names this drafter in `states`

    @property
    def states_end(self) -> int:
        return self._states[-1].end if self._states else 0

    @property
    def states_begin(self) -> int:
        return self._states[0].first if self._states else 0

    def add(self, first: int, states: States, at: int = 0, count: int | None = None) -> None:
        """Add the states of positions from `first` on: `count` rows of `states` from row `at` on; None: all rows.

        States of the same and later positions are replaced. If positions before `first` are missing, all earlier states
        are dropped.
        """
        old_end = self.states_end
        if first > old_end:
            self._states = []
        elif first < old_end:
            self._drop_from(first)
        self._states.append(_StateSlice(first, first + (len(states) if count is None else count), states, at))

    def states(self, first: int, end: int) -> States:
        """Return the states of positions [first, end), [end - first, numbers]."""
        if not self.states_begin <= first < end <= self.states_end:
            raise ValueError(
                f"there are no states of positions {first} .. {end}, only {self.states_begin} .. {self.states_end}"
            )
        parts: list[States] = []
        for state_slice in reversed(self._states):
            if state_slice.end <= first:
                break
            if state_slice.first < end:
                parts.append(state_slice.states(first, end))
        return stacked(parts[::-1])

    def missing_from(self, state_offset: int) -> int:
        """Return the next row to fill: row `end`, or the first later row for which there are states.

        Row t is computed from the states of position t - `state_offset`.
        """
        return max(self.end, self.states_begin + state_offset)

    def fill(self, first: int, end: int) -> None:
        """Mark rows [first, end) as filled; if they leave a gap, earlier rows are dropped."""
        if first > self.end:
            self.begin = first
        self.end = end

    def keep_newest(self, count: int = KEPT_STATES) -> None:
        """Drop states except those of the `count` newest positions. Some older ones may stay."""
        first = self.states_end - count
        while self._states and self._states[0].end <= first:
            self._states.pop(0)
        # Copy these rows of a long slice, because a view would keep the whole array alive.
        if self._states and self._states[0].end - self._states[0].first > count:
            oldest = self._states[0]
            newest = copied(oldest.states(oldest.end - count, oldest.end))
            self._states[0] = _StateSlice(oldest.end - count, oldest.end, newest, 0)

    def clip(self, rows: int) -> None:
        """Mark rows from `rows` on as not filled."""
        self.end = min(self.end, rows)
        self.begin = min(self.begin, self.end)

    def fork(self, rows: int) -> "ExtraRows":
        """Return the extra rows of a fork that starts with the first `rows` rows of this sequence."""
        copy = ExtraRows(self.name)
        copy.begin, copy.end = self.begin, self.end
        copy.clip(rows)
        copy._states = list(self._states)
        copy._drop_from(rows)
        return copy

    def mark(self, chain: Sequence[PrefixNode]) -> None:
        """Store the states of the last token in every published page whose rows are filled.

        This marks the pages as filled for other sequences. Stops at the first page that lacks rows or states.
        """
        while self.begin == 0 and self._marked < len(chain):
            node = chain[self._marked]
            end = (self._marked + 1) * len(node.tokens)
            if self.name not in node.states:
                if self.end < end or not self.states_begin < end <= self.states_end:
                    return
                node.states[self.name] = copied(self.states(end - 1, end))
            self._marked += 1

    def adopt(self, chain: Sequence[PrefixNode]) -> None:
        """Update `begin` and `end` after the chain's newest page has replaced a page of the sequence."""
        size = len(chain[-1].tokens)
        if self.name not in chain[-1].states:
            self.clip((len(chain) - 1) * size)  # rows of the replaced page are lost
        filled_rows = leading_pages(self.name, chain) * size
        if filled_rows >= self.begin:
            self.begin, self.end = 0, max(self.end, filled_rows)

    def _drop_from(self, position: int) -> None:
        while self._states and self._states[-1].first >= position:
            self._states.pop()
        if self._states and self.states_end > position:
            self._states[-1] = self._states[-1]._replace(end=position)


def leading_pages(name: str, chain: Sequence[PrefixNode]) -> int:
    """Return how many leading pages have the rows of this drafter."""
    return next((index for index, node in enumerate(chain) if name not in node.states), len(chain))


def cached_rows(chain: Sequence[PrefixNode]) -> dict[str, ExtraRows]:
    """Return the extra rows of a sequence that starts with these published pages, by drafter."""
    rows_by_drafter: dict[str, ExtraRows] = {}
    for name in {name for node in chain for name in node.states}:
        rows = rows_by_drafter[name] = ExtraRows(name)
        size = len(chain[0].tokens)
        rows.end = leading_pages(name, chain) * size
        if name in chain[-1].states:
            rows.add(len(chain) * size - 1, chain[-1].states[name])
    return rows_by_drafter
