"""Everything that a guess can touch, changed together or not at all."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.kv.paged_cache import PagedCache, RowMove
from foreword.models.batch import MASK_WORDS, ForwardBatch
from foreword.speculation.draft import Draft
from foreword.speculation.protocols import Scheduled


@dataclass(frozen=True)
class Verdict:
    """The accepted path through a draft and the tokens that it commits."""

    path: tuple[int, ...]  # accepted nodes, root first
    tokens: tuple[int, ...]  # their tokens, then one of the target's own unless the answer ended before it
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token if the request wants them
    error: str | None = None  # why the request cannot go on


NOTHING_DRAWN = Verdict((), ())
"""For a prompt chunk that does not reach the prompt's end."""


class Transaction:
    """One pass over several requests: reserves KV rows, then commits verdicts or leaves no trace."""

    def __init__(self, cache: PagedCache, scheduled: Sequence[Scheduled]) -> None:
        self._cache = cache
        self._scheduled = scheduled
        self._moves: list[RowMove] = []
        self._open = True

    def __enter__(self) -> "Transaction":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def batch(self, drafts: Sequence[Draft]) -> ForwardBatch:
        """Reserve rows for everyone and lay out the pass. The pending row moves become part of it."""
        for share, draft in zip(self._scheduled, drafts, strict=True):
            self._cache.reserve(share.request.kv, share.run + len(draft))
        self._moves = self._cache.take_moves()
        return lay_out(self._cache, self._scheduled, drafts, self._moves)

    def commit(self, verdicts: Sequence[Verdict]) -> None:
        """Tokens and KV of every request advance together."""
        self._open = False
        for share, verdict in zip(self._scheduled, verdicts, strict=True):
            self._cache.commit(share.request.kv, share.run, verdict.path)
            share.request.extend(verdict.tokens, verdict.logprobs)
            if verdict.error is not None:
                share.request.fail(verdict.error)

    def abort(self) -> None:
        """Nothing happened. Does nothing after a commit; safe to repeat."""
        if not self._open:
            return
        self._open = False
        for share in self._scheduled:
            self._cache.rollback(share.request.kv)
        self._cache.lose_moves(self._moves)


def lay_out(
    cache: PagedCache, scheduled: Sequence[Scheduled], drafts: Sequence[Draft], moves: Sequence[RowMove]
) -> ForwardBatch:
    """The rows of a pass: per request its run of committed tokens, then its draft nodes."""
    rows = _Rows()
    for share, draft in zip(scheduled, drafts, strict=True):
        rows.add(cache, share, draft)
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

    def add(self, cache: PagedCache, share: Scheduled, draft: Draft) -> None:
        request, kv = share.request, share.request.kv
        first, end = kv.computed, kv.computed + share.run
        self.token_ids += request.tokens[first:end] + list(draft.tokens)
        self.positions += [*range(first, end), *(end + depth - 1 for depth in draft.depths())]
        self.slots += [cache.slot(kv, row) for row in range(first, end + len(draft))]
        self.prefix_lens += [*range(first + 1, end + 1), *[end] * len(draft)]
        self.masks += [0] * share.run + [_signed(mask) for mask in draft.ancestor_masks()]
        self.tables.append(list(kv.pages))
        self.kv_lens.append(end + len(draft))
        self.starts.append(self.starts[-1] + share.run + len(draft))
        if share.reaches_end:
            newest = self.starts[-1] - len(draft) - 1
            self.logit_rows += range(newest, self.starts[-1])


def _signed(word: int) -> int:
    """A 64-bit mask as the int64 with the same bits."""
    return word - (1 << 64) if word >> 63 else word
