"""An early exit: the target's first layers write ahead on its own KV rows, and one layer behind them guesses."""

from collections.abc import Sequence

import numpy as np
import torch

from foreword.backends.batch import MAX_DRAFT_NODES
from foreword.backends.interface import HeadInput, head_output
from foreword.drafters.heads.growing import Begun, grow_by_passes
from foreword.drafters.heads.head_tree import HeadTree
from foreword.drafters.heads.in_pages import HeadInPages, Run
from foreword.drafters.heads.loading import HEAD_BY_LEVEL, LoadedRows
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Ask, RequestRows
from foreword.speculation.layout import SequenceRows

LAG = 0
"""The row of a token is made from its own state. The newest token has none yet: it is read first."""


class ExitHead(HeadInPages):
    """Its own rows are those of one layer. In the layers before it, what is committed is there already: the target's.

    Rows of guesses in these layers stand where the target's own pass will write the same ones.
    """

    traits = HEAD_BY_LEVEL

    def __init__(self, loaded: LoadedRows, width: int) -> None:
        super().__init__(loaded, LAG, scratch=MAX_DRAFT_NODES if width > 1 else 0)
        self._width = width

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """A chain, or a tree of `tree_width`; none where the target has not read all but the newest token."""
        ready = {index: found for index, ask in enumerate(asks) if (found := self._ready(ask)) is not None}
        if not ready:
            return [Draft()] * len(asks)
        trees = self._guess([asks[index] for index in ready], list(ready.values()))
        drafts = dict(zip(ready, (tree.draft() for tree in trees), strict=True))
        return [drafts.get(index, Draft()) for index in range(len(asks))]

    def _ready(self, ask: Ask) -> RequestRows | None:
        """The pages of a request that can be guessed for."""
        if ask.pages is None or ask.max_nodes < 1 or ask.max_depth < 1:
            return None
        rows, end = self._rows_of(ask.pages), len(ask.request.tokens) - 1
        is_known = rows.known >= end
        is_read = ask.pages.kv.computed >= end > 0 and ask.pages.kv.reserved > end
        return ask.pages if is_known and is_read else None

    def _guess(self, asks: list[Ask], pages: list[RequestRows]) -> list[HeadTree]:
        missing = [self._missing(ask, found) for ask, found in zip(asks, pages, strict=True)]
        runs = [run for run in missing if run is not None]
        starts = [
            self._rows_of(found).begin if run is None else run.start
            for run, found in zip(missing, pages, strict=True)
        ]
        store = pages[0].store
        if runs:
            self._fill_rows(runs)
        newest = [
            SequenceRows(found.kv, ask.request.tokens, 1, Draft(), first=len(ask.request.tokens) - 1)
            for ask, found in zip(asks, pages, strict=True)
        ]
        arrays = self._buffers.lay_out(pages[0].cache, newest, ()).arrays
        read = HeadInput(arrays, np.array(starts, np.int32), torch.empty(len(newest), 0), are_own=True)
        begun = Begun(head_output(self._filler, read, store), arrays.block_tables, read.starts)
        trees = [
            HeadTree(ask, self._width, found.kv.reserved - len(ask.request.tokens))
            for ask, found in zip(asks, pages, strict=True)
        ]
        grow_by_passes(trees, begun, self._filler, store, self._vocabulary)
        return trees

    def _missing(self, ask: Ask, pages: RequestRows) -> Run | None:
        """The rows of committed tokens that are not there yet."""
        rows, end = self._rows_of(pages), len(ask.request.tokens) - 1
        first = rows.missing_from(LAG)
        return Run(pages, rows, ask.request.tokens, first, end, LAG) if first < end else None
