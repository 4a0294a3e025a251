"""Memory for the arrays of forward batches, used again and again."""

from collections.abc import Sequence

import numpy as np

from foreword.backends.batch import BatchArrays, BatchSizes, ForwardBatch, Ints, Tap
from foreword.kv.sequence import GONE, KvSequence

_KEPT_VIEWS = 256
"""Sizes whose views are kept: making them takes longer than filling them, and few sizes come again and again."""


PAGES_AT_ONCE = 8
"""Tables are as wide as a multiple of this, so that arrays have new sizes once in so many pages of a text."""

Taps = tuple[Tap, ...]


class BatchMemory:
    """One block of memory that holds the arrays of one batch at a time."""

    def __init__(self, entries: int) -> None:
        self._memory = np.empty(entries, dtype=np.int32)
        self._views: dict[tuple[BatchSizes, Taps], tuple[BatchArrays, ForwardBatch]] = {}

    def views(self, sizes: BatchSizes, taps: Taps = ()) -> tuple[BatchArrays, ForwardBatch]:
        """Arrays of these sizes, with anything in them, and the batch that looks at them.

        They overwrite those that were given out before; if they need a larger block, those keep the old one.
        """
        views = self._views.get((sizes, taps))
        if views is None:
            entries = sizes.entries
            if entries > len(self._memory):
                self._memory = np.empty(max(entries, 2 * len(self._memory)), dtype=np.int32)
                self._views.clear()
            elif len(self._views) == _KEPT_VIEWS:
                self._views.clear()
            arrays = BatchArrays.carved(self._memory, sizes)
            views = self._views[sizes, taps] = arrays, ForwardBatch.of(arrays, taps)
        return views


class PageTables:
    """Block tables as one array that remembers the last batch's, so that a long one is not written anew."""

    def __init__(self) -> None:
        self._table = np.zeros((0, 0), dtype=np.int32)
        self._known: list[list[int]] = []  # what each row of the table holds; zeros follow

    def of(self, sequences: Sequence[KvSequence], page_size: int) -> Ints:
        """[sequences, at least the most pages], unused entries 0; a view that the next call overwrites."""
        most_pages = max([len(sequence.pages) for sequence in sequences], default=0)
        width = -(-most_pages // PAGES_AT_ONCE) * PAGES_AT_ONCE
        self._grow(len(sequences), width)
        for row, (known, sequence) in enumerate(zip(self._known, sequences, strict=False)):
            if known != sequence.pages:
                self._write(row, sequence.pages, sequence.computed // page_size)
        return self._table[: len(sequences), :width]

    def _grow(self, sequences: int, pages: int) -> None:
        height, width = self._table.shape
        if sequences > height or pages > width:
            height = max(sequences, 2 * height) if sequences > height else height
            width = max(pages, 2 * width) if pages > width else width
            self._table = np.zeros((height, width), dtype=np.int32)
            self._known = [[] for _ in range(height)]

    def _write(self, row: int, pages: list[int], settled: int) -> None:
        """Only what is after the `settled` pages, if the row's other entries are right already."""
        known, end = self._known[row], len(pages)
        kept = settled if known[:settled] == pages[:settled] else 0
        changed = pages[kept:]
        # Any page will do for those that are gone: nobody reads it.
        self._table[row, kept:end] = [max(page, 0) for page in changed] if GONE in changed else changed
        if end < len(known):
            self._table[row, end : len(known)] = 0
        known[kept:] = changed
