"""Pages before the window of all layers, which nobody reads any more."""

from foreword.kv.block_pool import BlockPool
from foreword.kv.sequence import GONE, KvSequence

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
