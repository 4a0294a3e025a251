"""Rows that a drafter keeps in the pages: which of them a sequence has, and what the next ones are made of."""

from collections.abc import Sequence
from typing import NamedTuple

from foreword.kv.prefix_cache import PrefixNode
from foreword.kv.states import States, copied, stacked

KEPT_STATES = 64
"""Newest tokens whose hidden states are kept: a drafter that was left out for a while starts again from there."""


class _Stretch(NamedTuple):
    """The states of some tokens in a row. They are taken out when they are read: a slice takes longer than the rest."""

    first: int  # position
    end: int
    of: States  # [rows, numbers], they are some of these
    at: int  # from this row on

    def states(self, first: int, stop: int) -> States:
        """Of those of the positions from `first` to `stop` that are its own."""
        shift = self.at - self.first
        return self.of[max(first, self.first) + shift : min(stop, self.end) + shift]


class ExtraRows:
    """The rows of one kind that a sequence has besides the decoder's own.

    Rows [begin, end) are filled. `begin` is 0 unless the drafter joined late, and then its past is shorter. The
    target's hidden states of the newest tokens are kept with them, because the next rows are made from these.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.begin = 0
        self.end = 0
        self._states: list[_Stretch] = []  # one after the other
        self._marked = 0  # leading published pages that are known to have these rows

    @property
    def known(self) -> int:
        """One past the last position whose states are known; 0: none are."""
        return self._states[-1].end if self._states else 0

    @property
    def first_known(self) -> int:
        """The first position whose states are known."""
        return self._states[0].first if self._states else 0

    def add(self, first: int, states: States, at: int = 0, count: int | None = None) -> None:
        """The states of the tokens from `first` on; they replace what was known of these, and a gap ends what was.

        They are `count` rows of `states` from row `at` on; None: all of them.
        """
        known = self.known
        if first > known:
            self._states = []
        elif first < known:
            self._drop_from(first)
        self._states.append(_Stretch(first, first + (len(states) if count is None else count), states, at))

    def states(self, first: int, stop: int) -> States:
        """[stop - first, numbers], of positions that are known."""
        if not self.first_known <= first < stop <= self.known:
            raise ValueError(f"states {first} .. {stop} of {self.first_known} .. {self.known}")
        parts: list[States] = []
        for stretch in reversed(self._states):
            if stretch.end <= first:
                break
            if stretch.first < stop:
                parts.append(stretch.states(first, stop))
        return stacked(parts[::-1])

    def missing_from(self, lag: int) -> int:
        """The first row that is to be filled: the next, or the first that can still be made.

        Row t is made from the states of position t - `lag`.
        """
        return max(self.end, self.first_known + lag)

    def fill(self, first: int, end: int) -> None:
        """Rows from `first` up to `end` are filled now; if they leave a gap, the rows before it no longer count."""
        if first > self.end:
            self.begin = first
        self.end = end

    def keep_newest(self, count: int = KEPT_STATES) -> None:
        """Keep only the states of the newest tokens."""
        first = self.known - count
        while self._states and self._states[0].end <= first:
            self._states.pop(0)
        # A long stretch is copied, or its last rows would keep all of it.
        if self._states and self._states[0].end - self._states[0].first > count:
            oldest = self._states[0]
            newest = copied(oldest.states(oldest.end - count, oldest.end))
            self._states[0] = _Stretch(oldest.end - count, oldest.end, newest, 0)

    def clip(self, rows: int) -> None:
        """Rows from `rows` on are gone."""
        self.end = min(self.end, rows)
        self.begin = min(self.begin, self.end)

    def fork(self, rows: int) -> "ExtraRows":
        """What a sequence that starts with the first `rows` rows has."""
        copy = ExtraRows(self.name)
        copy.begin, copy.end = self.begin, self.end
        copy.clip(rows)
        copy._states = list(self._states)
        copy._drop_from(rows)
        return copy

    def mark(self, chain: Sequence[PrefixNode]) -> None:
        """Let published pages know that they have these rows and all that came before; they get their last states."""
        while self.begin == 0 and self._marked < len(chain):
            node = chain[self._marked]
            end = (self._marked + 1) * len(node.tokens)
            if self.name not in node.states:
                if self.end < end or not self.first_known < end <= self.known:
                    return
                node.states[self.name] = copied(self.states(end - 1, end))
            self._marked += 1

    def adopt(self, chain: Sequence[PrefixNode]) -> None:
        """The newest page of the chain took the place of one of the sequence's own."""
        size = len(chain[-1].tokens)
        if self.name not in chain[-1].states:
            self.clip((len(chain) - 1) * size)  # those in the page are gone with it
        found = leading_pages(self.name, chain) * size
        if found >= self.begin:
            self.begin, self.end = 0, max(self.end, found)

    def _drop_from(self, position: int) -> None:
        """Forget states from `position` on."""
        while self._states and self._states[-1].first >= position:
            self._states.pop()
        if self._states and self.known > position:
            self._states[-1] = self._states[-1]._replace(end=position)


def leading_pages(name: str, chain: Sequence[PrefixNode]) -> int:
    """How many pages from the first on have rows of this kind."""
    return next((place for place, node in enumerate(chain) if name not in node.states), len(chain))


def found_rows(chain: Sequence[PrefixNode]) -> dict[str, ExtraRows]:
    """What a sequence that starts with these published pages has of every kind."""
    found: dict[str, ExtraRows] = {}
    for name in {name for node in chain for name in node.states}:
        rows = found[name] = ExtraRows(name)
        size = len(chain[0].tokens)
        rows.end = leading_pages(name, chain) * size
        if name in chain[-1].states:
            rows.add(len(chain) * size - 1, chain[-1].states[name])
    return found
