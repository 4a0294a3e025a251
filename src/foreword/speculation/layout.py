"""Lays out the rows of a pass: for each sequence a run of committed tokens, then its draft nodes.

It runs on the host in every pass. So it loops neither over many rows nor over the pages of a long context.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreword.backends.batch import BatchArrays, BatchSizes, ForwardBatch, Ints, RequestChunks, Tap
from foreword.kv.chunks import read_chunk
from foreword.kv.paged_cache import PagedCache
from foreword.kv.sequence import FREED, KvSequence, RowMove
from foreword.speculation.draft import Draft, node_columns

_CACHED_VIEWS = 256
"""Number of batch sizes whose array views are cached, because creating views takes longer than filling them."""

PAGES_AT_ONCE = 8
"""Table widths are multiples of this many pages, so that array sizes change only every eighth page of a text."""

Taps = tuple[Tap, ...]

FEW_ROWS = 8  # row count up to which Python loops are faster than array operations


class SequenceRows(NamedTuple):
    """The rows of one sequence in a pass."""

    kv: KvSequence  # rows after the computed end are reserved
    tokens: Sequence[int]  # committed tokens
    run: int  # number of committed tokens that get their KV in this pass
    draft: Draft  # nodes after the run; each node in this pass gets logits
    first_node: int = (
        0  # first node in this pass; earlier nodes got their KV in a previous pass over the draft
    )
    run_logits: int = 1  # number of trailing run tokens that get logits, at most the run
    wants_hidden: bool = False  # whether the hidden states of all these rows are kept
    first: int | None = None  # KV row of the run's first token; None: the first row that is not computed
    drawn_at: Sequence[int] = ()  # rows of the previous pass that draw the last tokens of the run
    adapter: int = 0  # adapter slot; 0: the base model


class BatchBuffers:
    """Reusable memory for the batches of one owner.

    A batch consists of views into it. Two halves alternate, so that a pass can be laid out while the previous one is
    in flight: a batch stays valid until the second `lay_out` after its own.
    """

    def __init__(self, entries: int = 1 << 16) -> None:
        """Allocate room for `entries` 32-bit numbers per batch; larger batches make it grow."""
        self._memory, self._other_memory = BatchMemory(entries), BatchMemory(entries)
        self._tables = PageTables()

    def lay_out(
        self,
        cache: PagedCache,
        parts: Sequence[SequenceRows],
        moves: Sequence[RowMove],
        taps: tuple[Tap, ...] = (),
        ring_moves: Sequence[RowMove] = (),
    ) -> ForwardBatch:
        """Return the batch of one pass.

        `moves` are executed first; `taps` select the hidden states to keep. Hidden states are ordered by sequence,
        and by row within a sequence. `ring_moves` are the moves of rows of recurrent layers.
        """
        self._memory, self._other_memory = self._other_memory, self._memory
        tables = self._tables.of([part.kv for part in parts], cache.page_size)
        rows = _Rows.of(parts)
        wanted = _logit_rows(parts, rows.starts)
        hidden = _hidden_rows(parts, rows.starts) if taps else ()
        sizes = BatchSizes(rows.starts[-1], len(parts), tables.shape[1], len(wanted), len(moves), len(hidden))
        arrays, batch = self._memory.views(sizes, taps)
        arrays.block_tables[:] = tables
        arrays.logit_rows[:] = wanted
        if taps:
            arrays.hidden_rows[:] = hidden
        arrays.kv_lens[:] = [
            end + len(part.draft.parents) for end, part in zip(rows.ends, parts, strict=True)
        ]
        arrays.row_starts[:] = rows.starts
        if rows.counts.count(1) == len(parts) and not any(part.draft.parents for part in parts):
            _fill_single_places(arrays, parts, rows, cache.page_size)
        elif rows.starts[-1] <= FEW_ROWS:
            _fill_few_places(arrays, parts, rows.begins, cache.page_size)
        else:
            _fill_places(arrays, parts, rows.begins, cache.page_size)
        _fill_tokens(arrays, parts, rows)
        if moves:
            arrays.kv_copies[:] = [(move.source, cache.slot(move.owner, move.row)) for move in moves]
        adapters = tuple(part.adapter for part in parts)
        if any(adapters):
            batch = replace(batch, adapters=adapters)
        if cache.chunks is None:
            return batch
        chunks = tuple(
            _chunks(part, begin, end) for part, begin, end in zip(parts, rows.begins, rows.ends, strict=True)
        )
        return replace(batch, chunks=chunks, ring_copies=_ring_copies(cache, ring_moves))


def _chunks(part: SequenceRows, begin: int, end: int) -> RequestChunks:
    read = read_chunk(part.kv.chunks, begin)
    return RequestChunks(
        begin, end - begin, read, tuple(c for c in part.kv.chunks if read.start < c.start < end)
    )


def _ring_copies(cache: PagedCache, moves: Sequence[RowMove]) -> tuple[tuple[int, int], ...]:
    targets = [(move.ring_source, cache.ring_slot(move.owner, move.row)) for move in moves]
    return tuple((source, target) for source, target in targets if source is not None and target is not None)


class _Rows(NamedTuple):
    """Row ranges of all parts."""

    begins: list[int]  # [parts], KV row of each run's first token
    ends: list[int]  # [parts], one past the KV row of its last token
    counts: list[int]  # [parts], rows in the pass
    starts: list[int]  # [parts + 1], index of each part's first row in the pass

    @staticmethod
    def of(parts: Sequence[SequenceRows]) -> "_Rows":
        begins = [part.kv.computed if part.first is None else part.first for part in parts]
        ends = [begin + part.run for begin, part in zip(begins, parts, strict=True)]
        counts = [part.run + len(part.draft.parents) - part.first_node for part in parts]
        return _Rows(begins, ends, counts, [0, *accumulate(counts)])


def _logit_rows(parts: Sequence[SequenceRows], starts: Sequence[int]) -> Sequence[int] | Ints:
    if all(part.run_logits >= part.run for part in parts):  # true while decoding
        return np.arange(starts[-1], dtype=np.int32)
    rows: list[int] = []
    for part, start, end in zip(parts, starts, starts[1:], strict=False):
        rows += range(start + part.run - min(part.run_logits, part.run), end)
    return rows


def _hidden_rows(parts: Sequence[SequenceRows], starts: Sequence[int]) -> Sequence[int] | Ints:
    if all(part.wants_hidden for part in parts):
        return np.arange(starts[-1], dtype=np.int32)
    rows: list[int] = []
    for part, start, end in zip(parts, starts, starts[1:], strict=False):
        if part.wants_hidden:
            rows += range(start, end)
    return rows


def _fill_places(
    arrays: BatchArrays, parts: Sequence[SequenceRows], begins: Sequence[int], page_size: int
) -> None:
    """Fill in the position, slot and visible rows of every row."""
    for part, length in zip(parts, arrays.kv_lens.tolist(), strict=True):
        if length > len(part.kv.pages) * page_size:  # the padded table would silently name a wrong page
            raise IndexError(f"{length} rows in {len(part.kv.pages)} pages")
    shapes = _row_shapes(tuple([(part.run, part.first_node, part.draft.parents) for part in parts]))
    begin = np.array(begins, dtype=np.int32)[shapes.part_of]
    np.add(begin, shapes.position, out=arrays.positions)
    np.add(begin, shapes.visible, out=arrays.prefix_lens)
    page, place = np.divmod(begin + shapes.kv_row, page_size)
    np.add(arrays.block_tables[shapes.part_of, page] * page_size, place, out=arrays.slots)
    arrays.ancestor_masks.view(np.uint64)[:, 0] = shapes.masks


def _fill_few_places(
    arrays: BatchArrays, parts: Sequence[SequenceRows], begins: Sequence[int], page_size: int
) -> None:
    """Do the work of `_fill_places` with lists, which are faster for few rows."""
    positions: list[int] = []
    visible: list[int] = []
    slots: list[int] = []
    masks: list[int] = []
    for part, begin in zip(parts, begins, strict=True):
        (kv_rows, own_positions, own_visible), own_masks = _row_lists(
            part.run, part.first_node, part.draft.parents
        )
        positions += [begin + position for position in own_positions]
        visible += [begin + count for count in own_visible]
        pages = part.kv.pages
        slots += [
            pages[(begin + row) // page_size] * page_size + (begin + row) % page_size for row in kv_rows
        ]
        masks += own_masks
    arrays.positions[:] = positions
    arrays.prefix_lens[:] = visible
    arrays.slots[:] = slots
    arrays.ancestor_masks.view(np.uint64)[:, 0] = masks


class _RowShapes(NamedTuple):
    """Row properties that depend only on runs and draft shapes; each [rows], relative to the part's start."""

    part_of: Ints  # index of the part
    kv_row: Ints
    position: Ints
    visible: Ints  # number of leading KV rows that it attends to
    masks: NDArray[np.uint64]  # draft nodes that it attends to


PartShape = tuple[int, int, tuple[int, ...]]
"""The (run, first node, parents) of one part."""


@lru_cache(maxsize=64)
def _row_shapes(part_shapes: tuple[PartShape, ...]) -> _RowShapes:
    """Return the row properties of a pass; cached, since most passes repeat the previous shapes."""
    parts = [_part_rows(*part_shape) for part_shape in part_shapes]
    part_of = np.arange(len(parts), dtype=np.int32).repeat([len(part.masks) for part in parts])
    kv_row, position, visible = np.concatenate([part.numbers for part in parts], axis=1)
    return _RowShapes(part_of, kv_row, position, visible, np.concatenate([part.masks for part in parts]))


class _PartRows(NamedTuple):
    numbers: Ints  # [3, rows]: KV row, position, number of leading KV rows that it attends to
    masks: NDArray[np.uint64]


@lru_cache(maxsize=256)
def _part_rows(run: int, first: int, parents: tuple[int, ...]) -> _PartRows:
    numbers = np.empty((3, run + len(parents) - first), np.int32)
    columns, own = node_columns(parents), np.arange(run)
    numbers[:, :run] = own, own, own + 1
    numbers[0, run:] = np.arange(run + first, run + len(parents))
    numbers[1, run:] = run - 1 + columns.depths[first:]
    numbers[2, run:] = run
    return _PartRows(numbers, np.concatenate([np.zeros(run, np.uint64), columns.masks[first:]]))


@lru_cache(maxsize=256)
def _row_lists(run: int, first: int, parents: tuple[int, ...]) -> tuple[list[list[int]], list[int]]:
    shapes = _part_rows(run, first, parents)
    return shapes.numbers.tolist(), shapes.masks.tolist()


def _fill_single_places(
    arrays: BatchArrays, parts: Sequence[SequenceRows], rows: "_Rows", page_size: int
) -> None:
    """Do the work of `_fill_places` for parts of one committed token each, without intermediate arrays."""
    arrays.ancestor_masks.fill(0)
    arrays.positions[:] = rows.begins
    arrays.prefix_lens[:] = rows.ends
    arrays.slots[:] = [
        part.kv.pages[row // page_size] * page_size + row % page_size
        for part, row in zip(parts, rows.begins, strict=True)
    ]


def _fill_tokens(arrays: BatchArrays, parts: Sequence[SequenceRows], rows: "_Rows") -> None:
    """Fill in the token of every row."""
    tokens: list[int] = []
    for part, begin, end in zip(parts, rows.begins, rows.ends, strict=True):
        tokens += part.tokens[begin:end]
        if part.drawn_at:
            tokens += [-1 - place for place in part.drawn_at]
        if part.draft.parents:
            tokens += part.draft.pass_ids[part.first_node :]
    if len(tokens) != len(arrays.token_ids):
        raise ValueError("a part's run ends after its last token")
    arrays.token_ids[:] = tokens


class BatchMemory:
    """Memory block for the arrays of one batch at a time."""

    def __init__(self, entries: int) -> None:
        self._memory = np.empty(entries, dtype=np.int32)
        self._views: dict[tuple[BatchSizes, Taps], tuple[BatchArrays, ForwardBatch]] = {}

    def views(self, sizes: BatchSizes, taps: Taps = ()) -> tuple[BatchArrays, ForwardBatch]:
        """Return uninitialised arrays of these sizes, and the batch that reads them.

        They overlap the arrays returned before. If a larger block is needed, the earlier arrays keep the old block.
        """
        views = self._views.get((sizes, taps))
        if views is None:
            entries = sizes.entries
            if entries > len(self._memory):
                self._memory = np.empty(max(entries, 2 * len(self._memory)), dtype=np.int32)
                self._views.clear()
            elif len(self._views) == _CACHED_VIEWS:
                self._views.clear()
            arrays = BatchArrays.carved(self._memory, sizes)
            views = self._views[sizes, taps] = arrays, ForwardBatch.of(arrays, taps)
        return views


class PageTables:
    """Block tables of a batch as one array, updated incrementally so that long tables are not rewritten."""

    def __init__(self) -> None:
        self._table = np.zeros((0, 0), dtype=np.int32)
        self._known: list[list[int]] = []  # pages in each row of the table; the rest of the row is zero

    def of(self, sequences: Sequence[KvSequence], page_size: int) -> Ints:
        """Return [sequences, at least the most pages], unused entries 0: a view that the next call overwrites."""
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
        """Write the entries after the `settled` pages; all entries if the settled ones differ."""
        known, end = self._known[row], len(pages)
        kept = settled if known[:settled] == pages[:settled] else 0
        changed = pages[kept:]
        # Freed pages are never read, so that any page number will do.
        self._table[row, kept:end] = [max(page, 0) for page in changed] if FREED in changed else changed
        if end < len(known):
            self._table[row, end : len(known)] = 0
        known[kept:] = changed
