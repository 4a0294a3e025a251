"""Lays out the rows of a pass: per sequence a run of committed tokens, then draft nodes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foreword.kv.paged_cache import KvSequence, PagedCache, RowMove
from foreword.models.batch import MASK_WORDS, ForwardBatch
from foreword.speculation.draft import Draft


@dataclass(frozen=True)
class Share:
    """One sequence's rows of a pass."""

    kv: KvSequence  # its rows behind the computed end are reserved
    tokens: Sequence[int]  # committed
    run: int  # committed tokens that get their KV now
    draft: Draft  # nodes behind the run
    first_node: int = 0  # nodes before this one have their KV from an earlier pass of the same draft
    run_logits: int = 1


class BatchBuffers:
    def lay_out(self, cache: PagedCache, shares: Sequence[Share], moves: Sequence[RowMove]) -> ForwardBatch:
        return lay_out(cache, shares, moves)


def lay_out(cache: PagedCache, shares: Sequence[Share], moves: Sequence[RowMove]) -> ForwardBatch:
    """The batch of one pass. `moves` are done before anything else."""
    rows = _Rows()
    for share in shares:
        rows.add(cache, share)
    most_pages = max((len(table) for table in rows.tables), default=0)
    tables = [table + [0] * (most_pages - len(table)) for table in rows.tables]
    copies = [(move.source, cache.slot(move.owner, move.row)) for move in moves]
    return ForwardBatch(
        token_ids=_int32(rows.token_ids),
        positions=_int32(rows.positions),
        slots=_int32(rows.slots),
        prefix_lens=_int32(rows.prefix_lens),
        ancestor_masks=torch.tensor(rows.masks, dtype=torch.int64).view(-1, MASK_WORDS),
        row_starts=_int32(rows.starts),
        block_tables=torch.tensor(tables, dtype=torch.int32).view(len(tables), most_pages),
        kv_lens=_int32(rows.kv_lens),
        logit_rows=_int32(rows.logit_rows),
        kv_copies=torch.tensor(copies, dtype=torch.int32).view(-1, 2),
    )


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class _Rows:
    """Columns of the batch while it is being laid out."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.prefix_lens: list[int] = []
        self.masks: list[int] = []
        self.starts = [0]
        self.tables: list[list[int]] = []
        self.kv_lens: list[int] = []
        self.logit_rows: list[int] = []

    def add(self, cache: PagedCache, share: Share) -> None:
        kv, draft = share.kv, share.draft
        first, end = kv.computed, kv.computed + share.run
        nodes = range(share.first_node, len(draft))
        depths, masks = draft.depths(), draft.ancestor_masks()
        self.token_ids += [*share.tokens[first:end], *(draft.tokens[node] for node in nodes)]
        self.positions += [*range(first, end), *(end + depths[node] - 1 for node in nodes)]
        self.slots += [cache.slot(kv, row) for row in [*range(first, end), *(end + node for node in nodes)]]
        self.prefix_lens += [*range(first + 1, end + 1), *[end] * len(nodes)]
        self.masks += [0] * share.run + [_signed(masks[node]) for node in nodes]
        self.tables.append(list(kv.pages))
        self.kv_lens.append(end + len(draft))
        self.starts.append(self.starts[-1] + share.run + len(nodes))
        newest = min(share.run_logits, share.run)
        self.logit_rows += range(self.starts[-1] - len(nodes) - newest, self.starts[-1])


def _signed(word: int) -> int:
    """A 64-bit mask as the int64 with the same bits."""
    return word - (1 << 64) if word >> 63 else word
