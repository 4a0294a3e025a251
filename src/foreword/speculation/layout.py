"""Lays out the rows of a pass: for each sequence a run of tokens without KV row, then its draft tokens.

This runs on the host in every pass, so it loops neither over many rows nor over the pages of a long context.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from operator import add, gt
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
"""Block tables are multiples of this many pages wide, so that array sizes change only every eighth page of a text."""

Taps = tuple[Tap, ...]  # layer boundaries whose hidden states are kept

FEW_ROWS = 8  # row count up to which Python loops are faster than array operations


class SequenceRows(NamedTuple):
    """The rows of one sequence in a pass."""

    kv: KvSequence  # its rows in this pass are reserved
    tokens: Sequence[int]  # the text: committed tokens
    run: int  # number of tokens of the text whose KV rows this pass computes
    draft: Draft  # nodes after the run; each node in this pass gets logits
    first_node: int = (
        0  # first node in this pass; an earlier pass over the draft computed the nodes before it
    )
    run_logits: int = 1  # number of trailing run tokens that get logits, at most the run
    wants_hidden: bool = False  # whether the hidden states of all these rows are kept
    first: int | None = None  # KV row of the run's first token; None: the first row that is not computed
    # For the last tokens of the run, if they are not in `tokens` yet: the rows of the previous pass that sample them.
    drawn_at: Sequence[int] = ()
    adapter: int = 0  # adapter slot; 0: the base model
    # Rows of the text, before the run, whose pages `kv` leaves out: the rows of `kv` are numbered without them.
    left_out: int = 0


class BatchBuffers:
    """Reusable memory for batches.

    A batch consists of views into this memory. Two halves alternate, so that a pass can be laid out while the previous
    one is in flight: each batch stays valid during the next `lay_out`, and the one after that overwrites it.
    """

    def __init__(self, entries: int = 1 << 16) -> None:
        """Allocate room for `entries` 32-bit numbers per batch; larger batches make it grow."""
        self._memory, self._other_memory = BatchMemory(entries), BatchMemory(entries)
        self._tables = PageTables()

    def lay_out(
        self,
        cache: PagedCache,
        sequences: Sequence[SequenceRows],
        moves: Sequence[RowMove],
        taps: tuple[Tap, ...] = (),
        ring_moves: Sequence[RowMove] = (),
    ) -> ForwardBatch:
        """Return the batch of one pass, which overwrites the batch before the previous one.

        The pass first executes `moves` of KV rows, and `ring_moves` of rows of recurrent layers. `taps` select the
        hidden states to keep, which are ordered by sequence and row.
        """
        self._memory, self._other_memory = self._other_memory, self._memory
        tables = self._tables.of([sequence.kv for sequence in sequences], cache.page_size)
        rows = _Rows.of(sequences)
        counted = list(zip(sequences, rows.counts, strict=True))
        logit_rows = rows.last(
            [count - max(sequence.run - sequence.run_logits, 0) for sequence, count in counted]
        )
        hidden_rows: Sequence[int] | Ints = ()
        if taps:
            hidden_rows = rows.last([count if sequence.wants_hidden else 0 for sequence, count in counted])
        sizes = BatchSizes(
            rows.starts[-1], len(sequences), tables.shape[1], len(logit_rows), len(moves), len(hidden_rows)
        )
        arrays, batch = self._memory.views(sizes, taps)
        arrays.block_tables[:] = tables
        arrays.logit_rows[:] = logit_rows
        if taps:
            arrays.hidden_rows[:] = hidden_rows
        arrays.kv_lens[:] = rows.lengths
        arrays.row_starts[:] = rows.starts
        if rows.counts.count(1) == len(sequences) and rows.lengths == rows.ends:
            _fill_single_rows(arrays, sequences, rows, cache.page_size)
        elif rows.starts[-1] <= FEW_ROWS:
            _fill_few_rows(arrays, sequences, rows.begins, cache.page_size)
        else:
            _fill_rows(arrays, sequences, rows, cache.page_size)
        _fill_tokens(arrays, sequences, rows)
        left_out = [sequence.left_out for sequence in sequences]
        if any(left_out):
            np.add(arrays.positions, np.repeat(left_out, rows.counts), out=arrays.positions, casting="unsafe")
            batch = replace(batch, has_gaps=True)
        if moves:
            arrays.kv_copies[:] = [(move.source, cache.slot(move.owner, move.row)) for move in moves]
        adapters = tuple(sequence.adapter for sequence in sequences)
        if any(adapters):
            batch = replace(batch, adapters=adapters)
        if cache.chunks is None:
            return batch
        chunks = tuple(
            _chunks(sequence, begin, end)
            for sequence, begin, end in zip(sequences, rows.begins, rows.ends, strict=True)
        )
        return replace(batch, chunks=chunks, ring_copies=_ring_copies(cache, ring_moves))


def _chunks(sequence: SequenceRows, begin: int, end: int) -> RequestChunks:
    """Return the chunk states that a run over the KV rows [begin, end) reads and writes."""
    read = read_chunk(sequence.kv.chunks, begin)
    written = tuple(chunk for chunk in sequence.kv.chunks if read.start < chunk.start < end)
    return RequestChunks(begin, end - begin, read, written)


def _ring_copies(cache: PagedCache, moves: Sequence[RowMove]) -> tuple[tuple[int, int], ...]:
    """Return the (source, target) ring slots of moved rows."""
    copies = [(move.ring_source, cache.ring_slot(move.owner, move.row)) for move in moves]
    return tuple((source, target) for source, target in copies if source is not None and target is not None)


class _Rows(NamedTuple):
    """Row ranges of all sequences."""

    begins: list[int]  # [sequences], KV row of each run's first token
    ends: list[int]  # [sequences], one past the KV row of the run's last token
    lengths: list[int]  # [sequences], KV rows with those of the draft
    counts: list[int]  # [sequences], rows in the pass
    starts: list[int]  # [sequences + 1], index of each sequence's first row in the pass

    @staticmethod
    def of(sequences: Sequence[SequenceRows]) -> "_Rows":
        begins = [
            sequence.kv.computed if sequence.first is None else sequence.first for sequence in sequences
        ]
        nodes = [len(sequence.draft.parents) for sequence in sequences]
        ends = [begin + sequence.run for begin, sequence in zip(begins, sequences, strict=True)]
        counts = [
            sequence.run + count - sequence.first_node
            for count, sequence in zip(nodes, sequences, strict=True)
        ]
        return _Rows(begins, ends, list(map(add, ends, nodes)), counts, [0, *accumulate(counts)])

    def last(self, counts: list[int]) -> Sequence[int] | Ints:
        """Return the indices of the last `counts` rows of each sequence."""
        if counts == self.counts:  # all rows, as while decoding
            return np.arange(self.starts[-1], dtype=np.int32)
        rows: list[int] = []
        for count, end in zip(counts, self.starts[1:], strict=True):
            rows += range(end - count, end)
        return rows


def _fill_rows(arrays: BatchArrays, sequences: Sequence[SequenceRows], rows: "_Rows", page_size: int) -> None:
    """Fill in the position, slot and visible rows of every row."""
    # Without this check, padding of the table would silently become a page.
    room = [len(sequence.kv.pages) * page_size for sequence in sequences]
    if any(map(gt, rows.lengths, room)):
        raise IndexError(f"{rows.lengths} rows in pages for {room}")
    shapes = _row_shapes(
        tuple([(sequence.run, sequence.first_node, sequence.draft.parents) for sequence in sequences])
    )
    begin = np.array(rows.begins, dtype=np.int32)[shapes.sequence_of]
    np.add(begin, shapes.position, out=arrays.positions)
    np.add(begin, shapes.visible, out=arrays.prefix_lens)
    page, offset = np.divmod(begin + shapes.kv_row, page_size)
    np.add(arrays.block_tables[shapes.sequence_of, page] * page_size, offset, out=arrays.slots)
    arrays.ancestor_masks.view(np.uint64)[:, 0] = shapes.masks


def _fill_few_rows(
    arrays: BatchArrays, sequences: Sequence[SequenceRows], begins: Sequence[int], page_size: int
) -> None:
    """Do the work of `_fill_rows` with lists, which are faster for few rows."""
    positions: list[int] = []
    visible: list[int] = []
    slots: list[int] = []
    masks: list[int] = []
    for sequence, begin in zip(sequences, begins, strict=True):
        # The numbers of `_RowShapes` for this sequence, relative to the run's first KV row.
        (kv_rows, relative_positions, visible_counts), sequence_masks = _row_lists(
            sequence.run, sequence.first_node, sequence.draft.parents
        )
        positions += [begin + position for position in relative_positions]
        visible += [begin + count for count in visible_counts]
        pages = sequence.kv.pages
        slots += [
            pages[(begin + row) // page_size] * page_size + (begin + row) % page_size for row in kv_rows
        ]
        masks += sequence_masks
    arrays.positions[:] = positions
    arrays.prefix_lens[:] = visible
    arrays.slots[:] = slots
    arrays.ancestor_masks.view(np.uint64)[:, 0] = masks


class _RowShapes(NamedTuple):
    """Row properties that depend only on runs and draft shapes; each [rows], relative to the run's first KV row."""

    sequence_of: Ints  # index of the sequence
    kv_row: Ints
    position: Ints
    visible: Ints  # number of leading KV rows that the row attends to
    masks: NDArray[np.uint64]  # draft tokens that the row attends to, one bit each


SequenceShape = tuple[int, int, tuple[int, ...]]
"""The (run, first node, parents) of one sequence."""


@lru_cache(maxsize=64)
def _row_shapes(sequence_shapes: tuple[SequenceShape, ...]) -> _RowShapes:
    """Return the row properties of a pass; cached, since most passes repeat the previous shapes."""
    each = [_shape_rows(*shape) for shape in sequence_shapes]
    sequence_of = np.arange(len(each), dtype=np.int32).repeat([len(rows.masks) for rows in each])
    kv_row, position, visible = np.concatenate([rows.numbers for rows in each], axis=1)
    return _RowShapes(sequence_of, kv_row, position, visible, np.concatenate([rows.masks for rows in each]))


class _ShapeRows(NamedTuple):
    """The row properties of one sequence."""

    numbers: Ints  # [3, rows]: `kv_row`, `position` and `visible` of `_RowShapes`
    masks: NDArray[np.uint64]  # [rows]


@lru_cache(maxsize=256)
def _shape_rows(run: int, first: int, parents: tuple[int, ...]) -> _ShapeRows:
    """Return the row properties of a sequence with this run, first node and draft shape."""
    numbers = np.empty((3, run + len(parents) - first), np.int32)
    columns, in_run = node_columns(parents), np.arange(run)
    numbers[:, :run] = in_run, in_run, in_run + 1
    # Draft tokens: KV rows after the run in draft order, positions by depth, and all rows of the run are visible.
    numbers[0, run:] = np.arange(run + first, run + len(parents))
    numbers[1, run:] = run - 1 + columns.depths[first:]
    numbers[2, run:] = run
    return _ShapeRows(numbers, np.concatenate([np.zeros(run, np.uint64), columns.masks[first:]]))


@lru_cache(maxsize=256)
def _row_lists(run: int, first: int, parents: tuple[int, ...]) -> tuple[list[list[int]], list[int]]:
    """Return the numbers and masks of `_shape_rows` as lists."""
    shapes = _shape_rows(run, first, parents)
    return shapes.numbers.tolist(), shapes.masks.tolist()


def _fill_single_rows(
    arrays: BatchArrays, sequences: Sequence[SequenceRows], rows: "_Rows", page_size: int
) -> None:
    """Do the work of `_fill_rows` for runs of one token without drafts; no intermediate arrays are created."""
    arrays.ancestor_masks.fill(0)
    arrays.positions[:] = rows.begins
    arrays.prefix_lens[:] = rows.ends
    arrays.slots[:] = [
        sequence.kv.pages[row // page_size] * page_size + row % page_size
        for sequence, row in zip(sequences, rows.begins, strict=True)
    ]


def _fill_tokens(arrays: BatchArrays, sequences: Sequence[SequenceRows], rows: "_Rows") -> None:
    """Fill in the token of every row; −1 − index stands for a token that the device has at this index."""
    tokens: list[int] = []
    for sequence, begin, end in zip(sequences, rows.begins, rows.ends, strict=True):
        tokens += sequence.tokens[begin + sequence.left_out : end + sequence.left_out]
        if sequence.drawn_at:
            tokens += [-1 - row for row in sequence.drawn_at]
        if sequence.draft.parents:
            tokens += sequence.draft.pass_ids[sequence.first_node :]
    if len(tokens) != len(arrays.token_ids):
        raise ValueError("a sequence's run ends after its last token")
    arrays.token_ids[:] = tokens


class BatchMemory:
    """Memory block for the arrays of one batch at a time."""

    def __init__(self, entries: int) -> None:
        self._memory = np.empty(entries, dtype=np.int32)
        self._views: dict[tuple[BatchSizes, Taps], tuple[BatchArrays, ForwardBatch]] = {}

    def views(self, sizes: BatchSizes, taps: Taps = ()) -> tuple[BatchArrays, ForwardBatch]:
        """Return uninitialised arrays of these sizes, and the batch that reads them.

        The arrays overlap those returned before, unless a larger block is needed: earlier arrays keep the old block.
        """
        views = self._views.get((sizes, taps))
        if views is None:
            entries = sizes.num_words
            if entries > len(self._memory):
                self._memory = np.empty(max(entries, 2 * len(self._memory)), dtype=np.int32)
                self._views.clear()
            elif len(self._views) == _CACHED_VIEWS:
                self._views.clear()
            arrays = BatchArrays.views_of(self._memory, sizes)
            views = self._views[sizes, taps] = arrays, ForwardBatch.of(arrays, taps)
        return views


class PageTables:
    """Block tables of a batch as one array, updated incrementally so that long tables are not rewritten."""

    def __init__(self) -> None:
        self._table = np.zeros((0, 0), dtype=np.int32)
        self._written: list[list[int]] = []  # pages in each row of the table; the rest of the row is zero

    def of(self, sequences: Sequence[KvSequence], page_size: int) -> Ints:
        """Return the page numbers of all sequences, [sequences, width], with zeros after the last page.

        The width is a multiple of `PAGES_AT_ONCE`. The result is a view that the next call overwrites.
        """
        most_pages = max([len(sequence.pages) for sequence in sequences], default=0)
        width = -(-most_pages // PAGES_AT_ONCE) * PAGES_AT_ONCE
        self._grow(len(sequences), width)
        for row, (written, sequence) in enumerate(zip(self._written, sequences, strict=False)):
            if written != sequence.pages:
                self._write(row, sequence.pages, sequence.computed // page_size)
        return self._table[: len(sequences), :width]

    def _grow(self, sequences: int, pages: int) -> None:
        height, width = self._table.shape
        if sequences > height or pages > width:
            height = max(sequences, 2 * height) if sequences > height else height
            width = max(pages, 2 * width) if pages > width else width
            self._table = np.zeros((height, width), dtype=np.int32)
            self._written = [[] for _ in range(height)]

    def _write(self, row: int, pages: list[int], settled: int) -> None:
        """Write the page numbers of a row after its first `settled` ones; all of them if these differ."""
        written, end = self._written[row], len(pages)
        first = settled if written[:settled] == pages[:settled] else 0
        changed = pages[first:]
        # Freed pages (`FREED`, a negative number) are never read, so any page number will do.
        self._table[row, first:end] = [max(page, 0) for page in changed] if FREED in changed else changed
        if end < len(written):
            self._table[row, end : len(written)] = 0
        written[first:] = changed
