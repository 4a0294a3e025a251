"""Lays out the rows of a pass: per sequence a run of committed tokens, then draft nodes.

Every pass pays for this on the host, so nothing here loops over rows or over the pages of a long context.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from foreword.backends.batch import BatchArrays, BatchSizes, ForwardBatch, Tap
from foreword.kv.paged_cache import PagedCache
from foreword.kv.sequence import KvSequence, RowMove
from foreword.speculation.draft import Draft
from foreword.speculation.rows.batch_memory import BatchMemory, PageTables


@dataclass(frozen=True)
class SequenceRows:
    """One sequence's rows of a pass."""

    kv: KvSequence  # its rows after the computed end are reserved
    tokens: Sequence[int]  # committed
    run: int  # committed tokens that get their KV now
    draft: Draft  # nodes after the run; all that are in this pass get their logits
    first_node: int = 0  # nodes before this one have their KV from an earlier pass of the same draft
    run_logits: int = 1  # how many of the last tokens of the run get their logits, if there are that many
    wants_hidden: bool = False  # whether the hidden states of all its rows in this pass are wanted
    first: int | None = None  # row of the run's first token; None: the first that is not computed
    adapter: int = 0  # slot of its adapter; 0: the model itself

    @property
    def nodes(self) -> int:
        return len(self.draft) - self.first_node

    @property
    def begin(self) -> int:
        return self.kv.computed if self.first is None else self.first


class BatchBuffers:
    """The memory in which one owner lays out its passes, one after another.

    A batch is made of views into it. Two halves are used in turn, so that a pass can be laid out while
    the one before it is still under way: a batch holds until the second `lay_out` after its own.
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
        counts = [part.run + part.nodes for part in parts]
        wanted = _logit_rows(parts)
        hidden = _hidden_rows(parts, counts) if taps else []
        sizes = BatchSizes(sum(counts), len(parts), tables.shape[1], len(wanted), len(moves), len(hidden))
        arrays, batch = self._memory.views(sizes, taps)
        arrays.block_tables[:] = tables
        arrays.logit_rows[:] = wanted
        if hidden:
            arrays.hidden_rows[:] = hidden
        arrays.kv_lens[:] = [part.begin + part.run + len(part.draft) for part in parts]
        arrays.row_starts[:] = [0, *accumulate(counts)]
        _fill_places(arrays, parts, counts, cache.page_size)
        _fill_tokens(arrays, parts)
        if moves:
            arrays.kv_copies[:] = [(move.source, cache.slot(move.owner, move.row)) for move in moves]
        adapters = tuple(part.adapter for part in parts)
        return replace(batch, adapters=adapters) if any(adapters) else batch


def _logit_rows(parts: Sequence[SequenceRows]) -> list[int]:
    rows: list[int] = []
    end = 0
    for part in parts:
        nodes = part.nodes
        end += part.run + nodes
        rows += range(end - nodes - min(part.run_logits, part.run), end)
    return rows


def _hidden_rows(parts: Sequence[SequenceRows], counts: Sequence[int]) -> list[int]:
    rows: list[int] = []
    end = 0
    for part, count in zip(parts, counts, strict=True):
        end += count
        if part.wants_hidden:
            rows += range(end - count, end)
    return rows


def _fill_places(
    arrays: BatchArrays, parts: Sequence[SequenceRows], counts: list[int], page_size: int
) -> None:
    """Where every row stands and how far it sees; nodes are given positions as if they were a chain."""
    figures: list[tuple[int, ...]] = []
    start = 0
    for request, (part, count) in enumerate(zip(parts, counts, strict=True)):
        first = part.begin
        figures.append((first - start, first + part.run, part.first_node, request))
        start += count
    per_request = np.array(figures, dtype=np.int32).reshape(-1, 4)
    shift, end, first_node, request_of = per_request.repeat(counts, axis=0).T  # each [rows]
    kv_row = np.arange(start, dtype=np.int32) + shift
    is_node = kv_row >= end
    kv_row += first_node * is_node
    page = kv_row // page_size
    np.add((arrays.block_tables[request_of, page] - page) * page_size, kv_row, out=arrays.slots)
    np.minimum(kv_row + 1, end, out=arrays.prefix_lens)
    arrays.positions[:] = kv_row


def _fill_tokens(arrays: BatchArrays, parts: Sequence[SequenceRows]) -> None:
    """Every row's token, and the masks and positions of nodes."""
    tokens: list[int] = []
    nodes: list[int] = []  # rows
    depths: list[int] = []
    masks: list[int] = []
    for part in parts:
        first, draft = part.begin, part.draft
        tokens += part.tokens[first : first + part.run]
        if len(draft):
            nodes += range(len(tokens), len(tokens) + part.nodes)
            tokens += draft.tokens[part.first_node :]
            depths += draft.depths()[part.first_node :]
            masks += draft.ancestor_masks()[part.first_node :]
    if len(tokens) != len(arrays.token_ids):
        raise ValueError("a part's run goes behind its last token")
    arrays.token_ids[:] = tokens
    arrays.ancestor_masks.fill(0)
    if nodes:
        arrays.positions[nodes] = arrays.prefix_lens[nodes] + np.array(depths, dtype=np.int32) - 1
        arrays.ancestor_masks.view(np.uint64)[nodes, 0] = masks
