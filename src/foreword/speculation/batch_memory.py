"""Memory for the arrays of forward batches, used again and again."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from foreword.backends.batch import MASK_WORDS, BatchArrays, ForwardBatch, Ints, Tap
from foreword.kv.sequence import KvSequence

_KEPT_VIEWS = 256
"""Sizes whose views are kept: making them takes longer than filling them, and few sizes come again and again."""


Taps = tuple[Tap, ...]


class BatchSizes(NamedTuple):
    """How large a batch is."""

    rows: int
    requests: int
    pages: int  # of the longest block table
    logit_rows: int
    kv_copies: int
    hidden_rows: int = 0

    @property
    def entries(self) -> int:
        """32-bit numbers in all arrays together."""
        per_row, per_request = 4 + 2 * MASK_WORDS, 2 + self.pages
        fixed = 1 + self.logit_rows + 2 * self.kv_copies + self.hidden_rows
        return self.rows * per_row + self.requests * per_request + fixed


class BatchMemory:
    """One block of memory that holds the arrays of one batch at a time."""

    def __init__(self, entries: int) -> None:
        self._memory = np.empty(entries, dtype=np.int32)
        self._views: dict[tuple[BatchSizes, Taps], tuple[BatchArrays, ForwardBatch]] = {}

    def views(self, sizes: BatchSizes, taps: Taps = ()) -> tuple[BatchArrays, ForwardBatch]:
        """Arrays of these sizes, with anything in them, and the batch that looks at them.

        They overwrite those that were given out before; if they need a larger block, those keep the old one.
        """
        if sizes.entries > len(self._memory):
            self._memory = np.empty(max(sizes.entries, 2 * len(self._memory)), dtype=np.int32)
            self._views.clear()
        views = self._views.get((sizes, taps))
        if views is None:
            if len(self._views) == _KEPT_VIEWS:
                self._views.clear()
            arrays = self._carve(sizes)
            tensors: dict[str, Any] = {
                name: torch.from_numpy(array) for name, array in arrays._asdict().items()
            }
            views = self._views[sizes, taps] = arrays, ForwardBatch(**tensors, taps=taps)
        return views

    def _carve(self, sizes: BatchSizes) -> BatchArrays:
        taken = 0

        def take(*shape: int) -> Ints:
            nonlocal taken
            start, taken = taken, taken + prod(shape)
            return self._memory[start:taken].reshape(shape)

        rows, requests = sizes.rows, sizes.requests
        return BatchArrays(
            ancestor_masks=take(rows, 2 * MASK_WORDS).view(np.int64),  # first, where 64 bits are aligned
            token_ids=take(rows),
            positions=take(rows),
            slots=take(rows),
            prefix_lens=take(rows),
            row_starts=take(requests + 1),
            kv_lens=take(requests),
            block_tables=take(requests, sizes.pages),
            logit_rows=take(sizes.logit_rows),
            kv_copies=take(sizes.kv_copies, 2),
            hidden_rows=take(sizes.hidden_rows),
        )


class PageTables:
    """Block tables as one array that remembers the last batch's, so that a long one is not written anew."""

    def __init__(self) -> None:
        self._table = np.zeros((0, 0), dtype=np.int32)
        self._known: list[list[int]] = []  # what each row of the table holds; zeros follow

    def of(self, sequences: Sequence[KvSequence], page_size: int) -> Ints:
        """[sequences, most pages], unused entries 0; a view that the next call overwrites."""
        most_pages = max((len(sequence.pages) for sequence in sequences), default=0)
        self._grow(len(sequences), most_pages)
        for row, sequence in enumerate(sequences):
            if self._known[row] != sequence.pages:
                self._write(row, sequence.pages, sequence.computed // page_size)
        return self._table[: len(sequences), :most_pages]

    def _grow(self, sequences: int, pages: int) -> None:
        height, width = self._table.shape
        if sequences > height or pages > width:
            height = max(sequences, 2 * height) if sequences > height else height
            width = max(pages, 2 * width) if pages > width else width
            self._table = np.zeros((height, width), dtype=np.int32)
            self._known = [[] for _ in range(height)]

    def _write(self, row: int, pages: list[int], settled: int) -> None:
        """Only what is behind the `settled` pages, if the row's other entries are right already."""
        known = self._known[row]
        kept = settled if known[:settled] == pages[:settled] else 0
        self._table[row, kept : len(pages)] = pages[kept:]
        self._table[row, len(pages) : len(known)] = 0
        self._known[row] = pages.copy()
