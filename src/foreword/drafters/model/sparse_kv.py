"""Drafts with the target itself, which attends only to a part of its KV rows.

These are the first rows, the newest ones, and parts in between that got most attention when this was last measured.
Keys are stored with their rotary embedding. So pages can be left out of a block table, and the attention kernels need
no change. Draft tokens write the KV rows that the target's pass will write again, with all rows visible.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from foreword.acceptance.transfer import started
from foreword.backends.batch import SHARE_PART, ForwardBatch, ForwardOutput
from foreword.backends.interface import Decoder
from foreword.backends.runner import ModelRunner
from foreword.drafters.heads.loading import draft_where_ready
from foreword.drafters.model.levels import LevelDrafter, TextRows
from foreword.drafters.registry import DrafterResources, drawn_kind, tree_width
from foreword.drafters.trees import GrowingTree
from foreword.errors import RequestError
from foreword.kv.paged_cache import PagedCache
from foreword.kv.sequence import KvSequence
from foreword.speculation.draft import NO_DRAFT, Draft
from foreword.speculation.drafting import (
    Drafter,
    DrafterNeeds,
    DraftRequest,
    DraftSource,
    DraftTask,
    RequestRows,
    Traits,
)
from foreword.speculation.layout import SequenceRows
from foreword.speculation.settings import DrafterSettings, at_least, setting


@dataclass(frozen=True)
class SparseKvConfig(DrafterSettings):
    """The positions to which draft tokens attend, in whole pages."""

    sink_tokens: int = setting(16, "first positions that draft tokens attend to", at_least(0))
    window_tokens: int = setting(1024, "newest positions that draft tokens attend to", at_least(1))
    top_tokens: int = setting(
        512,
        "positions between these that draft tokens also attend to: the parts of 128 with most attention; 0: none",
        at_least(0),
    )
    refresh_tokens: int = setting(
        32, "tokens after which attention is measured again, in a draft's first pass", at_least(1)
    )
    tree_width: int = tree_width()


class PartRanking(NamedTuple):
    """The parts of a text by the attention that its newest token gave them, most first."""

    length: int  # of the text
    parts: Sequence[int]


class Selection(NamedTuple):
    """The pages of a text that draft tokens attend to."""

    pages: RequestRows
    newest: int  # position of the newest token
    first: int  # number of leading pages
    window: int  # index of the first of the newest pages

    def rows(self, parts: Sequence[int], most: int) -> TextRows:
        """Return the KV rows of the first pages, of the first `most` of these parts in between, and of the newest ones.

        A part that begins among the first pages does not count: the attention to sinks is not due to its content.
        """
        kv, size = self.pages.kv, self.pages.cache.page_size
        each = SHARE_PART // size
        between = [part for part in parts if self.first <= part * each < self.window][:most]
        chosen = [
            page
            for part in sorted(between)
            for page in kv.pages[part * each : min((part + 1) * each, self.window)]
        ]
        left_out = (self.window - self.first - len(chosen)) * size
        selected = kv.pages[: self.first] + chosen + kv.pages[self.window :]
        return TextRows(KvSequence(selected, self.newest + 1 - left_out), left_out)


class SparseKvDrafter(LevelDrafter):
    """Drafts with the target's weights and KV rows; only texts that are longer than what it attends to."""

    traits = Traits(
        DraftSource.MODEL,
        DrafterNeeds(target_rows=True),
        drafts_by_level=True,
        needs_target="it reads the target's KV cache",
    )

    def __init__(self, decoder: Decoder, vocab_size: int, config: SparseKvConfig) -> None:
        super().__init__(config.tree_width)
        self._decoder, self._vocab_size, self._config = decoder, vocab_size, config
        self._most_parts = -(-config.top_tokens // SHARE_PART)
        self._rankings: dict[int, PartRanking] = {}  # by request id
        # Of the call in progress
        self._runner: ModelRunner | None = None
        self._rows: dict[int, TextRows] = {}  # by request id

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Return a chain, or a tree of `tree_width`; empty if no page can be left out."""
        return draft_where_ready(tasks, list(map(self._selection, tasks)), self._draft)

    def forget(self, request: DraftRequest) -> None:
        self._rankings.pop(request.request_id, None)

    def memory_bytes(self) -> int:
        return 0

    def _selection(self, task: DraftTask) -> Selection | None:
        """Return the pages to attend to; None if they would be all, or if rows are missing."""
        pages, newest = task.pages, len(task.request.tokens) - 1
        if pages is None or task.max_nodes < 1 or task.max_depth < 1:
            return None
        size = pages.cache.page_size
        if pages.kv.computed != newest or pages.kv.reserved <= newest:
            return None
        first = -(-self._config.sink_tokens // size)
        window = max(newest + 1 - self._config.window_tokens, 0) // size
        if window - first <= self._most_parts * (SHARE_PART // size):
            return None
        return Selection(pages, newest, first, window)

    def _draft(self, tasks: list[DraftTask], selections: list[Selection]) -> list[Draft]:
        pages = selections[0].pages
        self._runner = ModelRunner(self._decoder, pages.store, self._vocab_size)
        began = started(self._decoder.device)
        trees = [GrowingTree(task, self._width) for task in tasks]
        requests = [task.request for task in tasks]
        due = list(map(self._is_due, requests))
        # A request whose attention is measured attends to all rows in this pass.
        rows = [
            TextRows(selection.pages.kv) if is_due else self._chosen(request, selection)
            for request, selection, is_due in zip(requests, selections, due, strict=True)
        ]
        output = self._forward(self._newest_tokens(requests, rows, pages.cache, measures=any(due)))
        if output.shares is not None:
            self._rank(requests, due, output.shares)
        for tree in trees:
            tree.is_cold |= output.is_cold
        self._rows = {
            request.request_id: self._chosen(request, selection)
            for request, selection in zip(requests, selections, strict=True)
        }
        self._grow(trees, output.logits, pages.cache, began)
        return [tree.draft() for tree in trees]

    def _is_due(self, request: DraftRequest) -> bool:
        """Return whether the attention of the newest token is to be measured."""
        ranking = self._rankings.get(request.request_id)
        return self._most_parts > 0 and (
            ranking is None or len(request.tokens) - ranking.length >= self._config.refresh_tokens
        )

    def _chosen(self, request: DraftRequest, selection: Selection) -> TextRows:
        ranking = self._rankings.get(request.request_id)
        return selection.rows(() if ranking is None else ranking.parts, self._most_parts)

    def _newest_tokens(
        self, requests: Sequence[DraftRequest], rows: Sequence[TextRows], cache: PagedCache, measures: bool
    ) -> ForwardBatch:
        """Return a pass over the newest token of every text."""
        sequences = [
            SequenceRows(
                kv,
                request.tokens,
                1,
                NO_DRAFT,
                first=len(request.tokens) - 1 - left_out,
                left_out=left_out,
            )
            for request, (kv, left_out) in zip(requests, rows, strict=True)
        ]
        batch = self._buffers.lay_out(cache, sequences, ())
        return replace(batch, wants_shares=True) if measures else batch

    def _rank(self, requests: Sequence[DraftRequest], due: Sequence[bool], shares: Tensor) -> None:
        """Store the order of the parts of the requests that are due; `shares` is [requests, parts]."""
        order = shares.argsort(dim=1, descending=True, stable=True).tolist()
        for request, is_due, parts in zip(requests, due, order, strict=True):
            if is_due:
                self._rankings[request.request_id] = PartRanking(len(request.tokens), parts)

    def _rows_of(self, request: DraftRequest) -> TextRows:
        return self._rows[request.request_id]

    def _forward(self, batch: ForwardBatch) -> ForwardOutput:
        assert self._runner is not None
        return self._runner.forward(batch)


def build_sparse_kv(config: SparseKvConfig, resources: DrafterResources) -> Drafter:
    """Create the drafter; refuse targets whose KV rows it could not leave out, or would not gain from leaving out."""
    target = resources.target
    if target.config.recurrent is not None:
        raise RequestError(
            "speculation: sparse_kv needs attention in all layers, and this model has recurrent ones; "
            "use ngram, suffix or a head instead"
        )
    window = target.kv_rows().window
    if window is not None:
        raise RequestError(
            f"speculation: all layers of this model attend only to the newest {window} positions, so sparse_kv "
            "would leave nothing out; use ngram, suffix or a head instead"
        )
    return SparseKvDrafter(target, resources.vocab_size, config)


KIND = drawn_kind(SparseKvDrafter, "the target with a part of its KV cache", SparseKvConfig, build_sparse_kv)
