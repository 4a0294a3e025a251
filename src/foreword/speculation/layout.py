"""Lays out the rows of a pass: per sequence a run of committed tokens, then draft nodes.

Every pass pays for this on the host, so nothing here loops over rows or over the pages of a long context.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreword.backends.batch import BatchArrays, BatchSizes, ForwardBatch, Ints, Tap
from foreword.kv.paged_cache import PagedCache
from foreword.kv.sequence import GONE, KvSequence, RowMove
from foreword.speculation.draft import Draft, node_columns

_KEPT_VIEWS = 256
"""Sizes whose views are kept: making them takes longer than filling them, and few sizes come again and again."""

PAGES_AT_ONCE = 8
"""Tables are as wide as a multiple of this, so that arrays have new sizes once in so many pages of a text."""

Taps = tuple[Tap, ...]

FEW_ROWS = 8
"""Rows of a pass whose numbers are worked out one by one."""


class SequenceRows(NamedTuple):
    """One sequence's rows of a pass."""

    kv: KvSequence  # its rows after the computed end are reserved
    tokens: Sequence[int]  # committed
    run: int  # committed tokens that get their KV now
    draft: Draft  # nodes after the run; all that are in this pass get their logits
    first_node: int = 0  # nodes before this one have their KV from an earlier pass of the same draft
    run_logits: int = 1  # how many of the last tokens of the run get their logits, if there are that many
    wants_hidden: bool = False  # whether the hidden states of all its rows in this pass are wanted
    first: int | None = None  # row of the run's first token; None: the first that is not computed
    drawn_at: Sequence[
        int
    ] = ()  # where the pass before draws the last tokens of the run; the others are known
    adapter: int = 0  # slot of its adapter; 0: the model itself


class BatchBuffers:
    """The memory in which one owner lays out its passes, one after another.

    A batch is made of views into it. Two halves are used in turn, so that a pass can be laid out while
    the one before it is still in flight: a batch holds until the second `lay_out` after its own.
    """

    def __init__(self, entries: int = 1 << 16) -> None:
        """Room for batches of `entries` 32-bit numbers to begin with; larger ones make it grow."""
        self._memory, self._other_memory = BatchMemory(entries), BatchMemory(entries)
        self._tables = PageTables()

    def lay_out(
        self,
        cache: PagedCache,
        parts: Sequence[SequenceRows],
        moves: Sequence[RowMove],
        taps: tuple[Tap, ...] = (),
    ) -> ForwardBatch:
        """The batch of one pass. `moves` are done before anything else; `taps` say which hidden states are kept.

        The hidden states of a pass stand one sequence after the other, those of a sequence in the order of its rows.
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
        return replace(batch, adapters=adapters) if any(adapters) else batch


class _Rows(NamedTuple):
    """Where the rows of every part are."""

    begins: list[int]  # [parts], KV row of the run's first token
    ends: list[int]  # [parts], one past its last token
    counts: list[int]  # [parts], rows of the pass
    starts: list[int]  # [parts + 1], the first of them

    @staticmethod
    def of(parts: Sequence[SequenceRows]) -> "_Rows":
        begins = [part.kv.computed if part.first is None else part.first for part in parts]
        ends = [begin + part.run for begin, part in zip(begins, parts, strict=True)]
        counts = [part.run + len(part.draft.parents) - part.first_node for part in parts]
        return _Rows(begins, ends, counts, [0, *accumulate(counts)])


def _logit_rows(parts: Sequence[SequenceRows], starts: Sequence[int]) -> Sequence[int] | Ints:
    if all(part.run_logits >= part.run for part in parts):  # as where answers are decoded
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
    """Where every row stands and how far it sees."""
    for part, length in zip(parts, arrays.kv_lens.tolist(), strict=True):
        if length > len(part.kv.pages) * page_size:  # tables are wider than that, and would name any page
            raise IndexError(f"{length} rows in {len(part.kv.pages)} pages")
    ways = _ways(tuple([(part.run, part.first_node, part.draft.parents) for part in parts]))
    begin = np.array(begins, dtype=np.int32)[ways.part_of]
    np.add(begin, ways.position, out=arrays.positions)
    np.add(begin, ways.sees, out=arrays.prefix_lens)
    page, place = np.divmod(begin + ways.kv_row, page_size)
    np.add(arrays.block_tables[ways.part_of, page] * page_size, place, out=arrays.slots)
    arrays.ancestor_masks.view(np.uint64)[:, 0] = ways.masks


def _fill_few_places(
    arrays: BatchArrays, parts: Sequence[SequenceRows], begins: Sequence[int], page_size: int
) -> None:
    """The same for few rows, as one request has: whole arrays take longer than lists there."""
    positions: list[int] = []
    sees: list[int] = []
    slots: list[int] = []
    masks: list[int] = []
    for part, begin in zip(parts, begins, strict=True):
        (kv_rows, own_positions, own_sees), own_masks = _few_ways(
            part.run, part.first_node, part.draft.parents
        )
        positions += [begin + position for position in own_positions]
        sees += [begin + seen for seen in own_sees]
        pages = part.kv.pages
        slots += [
            pages[(begin + row) // page_size] * page_size + (begin + row) % page_size for row in kv_rows
        ]
        masks += own_masks
    arrays.positions[:] = positions
    arrays.prefix_lens[:] = sees
    arrays.slots[:] = slots
    arrays.ancestor_masks.view(np.uint64)[:, 0] = masks


class _Ways(NamedTuple):
    """What runs and drafts alone decide of the rows of a pass; each [rows], counted from the beginning of the part."""

    part_of: Ints  # whose row it is
    kv_row: Ints
    position: Ints
    sees: Ints  # rows that it sees in full
    masks: NDArray[np.uint64]  # the draft nodes that it sees


Kind = tuple[int, int, tuple[int, ...]]
"""Run, first node and parents of one part."""


@lru_cache(maxsize=64)
def _ways(kinds: tuple[Kind, ...]) -> _Ways:
    """Pass after pass has parts of the same kinds."""
    parts = [_ways_of_one(*kind) for kind in kinds]
    part_of = np.arange(len(parts), dtype=np.int32).repeat([len(part.masks) for part in parts])
    kv_row, position, sees = np.concatenate([part.numbers for part in parts], axis=1)
    return _Ways(part_of, kv_row, position, sees, np.concatenate([part.masks for part in parts]))


class _PartWays(NamedTuple):
    numbers: Ints  # [3, rows]: KV row, position, rows that it sees in full
    masks: NDArray[np.uint64]


@lru_cache(maxsize=256)
def _ways_of_one(run: int, first: int, parents: tuple[int, ...]) -> _PartWays:
    numbers = np.empty((3, run + len(parents) - first), np.int32)
    columns, own = node_columns(parents), np.arange(run)
    numbers[:, :run] = own, own, own + 1
    numbers[0, run:] = np.arange(run + first, run + len(parents))
    numbers[1, run:] = run - 1 + columns.depths[first:]
    numbers[2, run:] = run
    return _PartWays(numbers, np.concatenate([np.zeros(run, np.uint64), columns.masks[first:]]))


@lru_cache(maxsize=256)
def _few_ways(run: int, first: int, parents: tuple[int, ...]) -> tuple[list[list[int]], list[int]]:
    """The same as lists."""
    ways = _ways_of_one(run, first, parents)
    return ways.numbers.tolist(), ways.masks.tolist()


def _fill_single_places(
    arrays: BatchArrays, parts: Sequence[SequenceRows], rows: "_Rows", page_size: int
) -> None:
    """The same where every part is one committed token: for so few numbers, arrays in between take longer."""
    arrays.ancestor_masks.fill(0)
    arrays.positions[:] = rows.begins
    arrays.prefix_lens[:] = rows.ends
    arrays.slots[:] = [
        part.kv.pages[row // page_size] * page_size + row % page_size
        for part, row in zip(parts, rows.begins, strict=True)
    ]


def _fill_tokens(arrays: BatchArrays, parts: Sequence[SequenceRows], rows: "_Rows") -> None:
    """Every row's token."""
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
        # Any page will do for those that are gone: it is not read.
        self._table[row, kept:end] = [max(page, 0) for page in changed] if GONE in changed else changed
        if end < len(known):
            self._table[row, end : len(known)] = 0
        known[kept:] = changed
