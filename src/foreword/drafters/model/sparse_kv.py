"""Drafts with the target itself, which attends only to a part of its KV rows: the first ones and the newest ones.

Keys are stored with their rotary embedding. So pages can be left out of a block table, and the attention kernels need
no change. Draft tokens write the KV rows that the target's pass will write again, with all rows visible.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.acceptance.transfer import started
from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.backends.interface import Decoder
from foreword.backends.runner import ModelRunner
from foreword.drafters.heads.loading import draft_where_ready
from foreword.drafters.model.levels import LevelDrafter, TextRows
from foreword.drafters.registry import DrafterResources, drawn_kind, tree_width
from foreword.drafters.trees import GrowingTree
from foreword.errors import RequestError
from foreword.kv.sequence import KvSequence
from foreword.speculation.draft import NO_DRAFT, Draft
from foreword.speculation.drafting import (
    Drafter,
    DrafterNeeds,
    DraftRequest,
    DraftSource,
    DraftTask,
    Traits,
)
from foreword.speculation.layout import SequenceRows
from foreword.speculation.settings import DrafterSettings, at_least, setting


@dataclass(frozen=True)
class SparseKvConfig(DrafterSettings):
    """The positions to which draft tokens attend, in whole pages."""

    sinks: int = setting(16, "first positions that draft tokens attend to", at_least(0))
    window: int = setting(512, "newest positions that draft tokens attend to", at_least(1))
    tree_width: int = tree_width()


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
        self._runner: ModelRunner | None = None  # of the call in progress
        self._parts: dict[int, TextRows] = {}  # by request, in the call in progress

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Return a chain, or a tree of `tree_width`; empty if no page can be left out."""
        return draft_where_ready(tasks, list(map(self._part_of, tasks)), self._draft)

    def memory_bytes(self) -> int:
        return 0

    def _part_of(self, task: DraftTask) -> TextRows | None:
        """Return the part of the request's KV rows to attend to; None if it is all of them, or rows are missing."""
        pages, newest = task.pages, len(task.request.tokens) - 1
        if pages is None or task.max_nodes < 1 or task.max_depth < 1:
            return None
        kv, size = pages.kv, pages.cache.page_size
        if kv.computed != newest or kv.reserved <= newest:
            return None
        first = -(-self._config.sinks // size)
        window = max(newest + 1 - self._config.window, 0) // size
        if window <= first:
            return None
        left_out = (window - first) * size
        part = KvSequence(kv.pages[:first] + kv.pages[window:], newest + 1 - left_out)
        return TextRows(part, left_out)

    def _draft(self, tasks: list[DraftTask], parts: list[TextRows]) -> list[Draft]:
        pages = tasks[0].pages
        assert pages is not None
        self._runner = ModelRunner(self._decoder, pages.store, self._vocab_size)
        self._parts = {task.request.request_id: part for task, part in zip(tasks, parts, strict=True)}
        trees = [GrowingTree(task, self._width) for task in tasks]
        began = started(self._decoder.device)
        newest = [
            SequenceRows(kv, task.request.tokens, 1, NO_DRAFT, first=kv.computed - 1, left_out=left_out)
            for task, (kv, left_out) in zip(tasks, parts, strict=True)
        ]
        self._grow(trees, self._run(trees, newest, pages.cache), pages.cache, began)
        return [tree.draft() for tree in trees]

    def _rows_of(self, request: DraftRequest) -> TextRows:
        return self._parts[request.request_id]

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
