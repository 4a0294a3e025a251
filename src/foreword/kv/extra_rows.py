"""Rows that a drafter keeps in a sequence's pages, and the hidden states for the next ones."""

from collections.abc import Sequence
from typing import NamedTuple

from foreword.kv.prefix_cache import PrefixNode
from foreword.kv.states import States, copied, stacked

KEPT_STATES = 64
"""Newest tokens whose hidden states are kept, so that a drafter can resume after a pause."""


class _StateSlice(NamedTuple):
    """States of consecutive tokens, sliced only when read."""

    first: int  # position
    end: int
    of: States  # [rows, numbers], a larger tensor
    at: int  # first row of these states in it

    def states(self, first: int, stop: int) -> States:
        """Return its part of the states of positions first .. stop."""
        shift = self.at - self.first
        return self.of[max(first, self.first) + shift : min(stop, self.end) + shift]


class ExtraRows:
    """Rows of one drafter in a sequence, besides the decoder's own.

    Rows [begin, end) are filled; `begin` is above 0 if the drafter joined late. The newest hidden states of the
    target are kept as well, because the next rows are computed from them.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.begin = 0
        self.end = 0
        self._states: list[_StateSlice] = []  # consecutive
        self._marked = 0  # leading published pages known to have these rows

    @property
    def known(self) -> int:
        return self._states[-1].end if self._states else 0

    @property
    def first_known(self) -> int:
        return self._states[0].first if self._states else 0

    def add(self, first: int, states: States, at: int = 0, count: int | None = None) -> None:
        """Add the states of the tokens from `first` on, replacing known ones; a gap discards the earlier ones.

        They are `count` rows of `states` from row `at` on; None: all of them.
        """
        known = self.known
        if first > known:
            self._states = []
        elif first < known:
            self._drop_from(first)
        self._states.append(_StateSlice(first, first + (len(states) if count is None else count), states, at))

    def states(self, first: int, stop: int) -> States:
        """Return the states of known positions, [stop - first, numbers]."""
        if not self.first_known <= first < stop <= self.known:
            raise ValueError(f"states {first} .. {stop} of {self.first_known} .. {self.known}")
        parts: list[States] = []
        for stretch in reversed(self._states):
            if stretch.end <= first:
                break
            if stretch.first < stop:
                parts.append(stretch.states(first, stop))
        return stacked(parts[::-1])

    def missing_from(self, state_offset: int) -> int:
        """Return the next row to fill: the one after `end`, or the first that can still be computed.

        Row t is computed from the states of position t - `state_offset`.
        """
        return max(self.end, self.first_known + state_offset)

    def fill(self, first: int, end: int) -> None:
        """Mark rows first .. end as filled; if they leave a gap, earlier rows are dropped."""
        if first > self.end:
            self.begin = first
        self.end = end

    def keep_newest(self, count: int = KEPT_STATES) -> None:
        first = self.known - count
        while self._states and self._states[0].end <= first:
            self._states.pop(0)
        # Copy a long stretch, since a slice would keep all of it alive.
        if self._states and self._states[0].end - self._states[0].first > count:
            oldest = self._states[0]
            newest = copied(oldest.states(oldest.end - count, oldest.end))
            self._states[0] = _StateSlice(oldest.end - count, oldest.end, newest, 0)

    def clip(self, rows: int) -> None:
        self.end = min(self.end, rows)
        self.begin = min(self.begin, self.end)

    def fork(self, rows: int) -> "ExtraRows":
        """Return the state of a sequence that starts with the first `rows` rows."""
        copy = ExtraRows(self.name)
        copy.begin, copy.end = self.begin, self.end
        copy.clip(rows)
        copy._states = list(self._states)
        copy._drop_from(rows)
        return copy

    def mark(self, chain: Sequence[PrefixNode]) -> None:
        """Record in published pages that they have these rows, with their last states."""
        while self.begin == 0 and self._marked < len(chain):
            node = chain[self._marked]
            end = (self._marked + 1) * len(node.tokens)
            if self.name not in node.states:
                if self.end < end or not self.first_known < end <= self.known:
                    return
                node.states[self.name] = copied(self.states(end - 1, end))
            self._marked += 1

    def adopt(self, chain: Sequence[PrefixNode]) -> None:
        """Update the state after the newest page of the chain replaced one of the sequence's own."""
        size = len(chain[-1].tokens)
        if self.name not in chain[-1].states:
            self.clip((len(chain) - 1) * size)  # rows of the replaced page are lost
        found = leading_pages(self.name, chain) * size
        if found >= self.begin:
            self.begin, self.end = 0, max(self.end, found)

    def _drop_from(self, position: int) -> None:
        while self._states and self._states[-1].first >= position:
            self._states.pop()
        if self._states and self.known > position:
            self._states[-1] = self._states[-1]._replace(end=position)


def leading_pages(name: str, chain: Sequence[PrefixNode]) -> int:
    """Return how many leading pages have rows of this drafter."""
    return next((place for place, node in enumerate(chain) if name not in node.states), len(chain))


def found_rows(chain: Sequence[PrefixNode]) -> dict[str, ExtraRows]:
    """Return the extra rows of a sequence that starts with these published pages, by drafter."""
    found: dict[str, ExtraRows] = {}
    for name in {name for node in chain for name in node.states}:
        rows = found[name] = ExtraRows(name)
        size = len(chain[0].tokens)
        rows.end = leading_pages(name, chain) * size
        if name in chain[-1].states:
            rows.add(len(chain) * size - 1, chain[-1].states[name])
    return found
