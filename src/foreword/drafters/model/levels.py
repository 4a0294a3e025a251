"""The base of drafters that run a decoder once per level of a draft."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foreword.acceptance.transfer import HostCopy
from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.drafters.next_level import can_draw_on_device, draw_on_device, grow_chains, grow_trees
from foreword.drafters.trees import GrowingTree
from foreword.kv.paged_cache import PagedCache
from foreword.kv.sequence import KvSequence
from foreword.speculation.draft import NO_DRAFT
from foreword.speculation.drafting import Drafter, DraftRequest
from foreword.speculation.layout import BatchBuffers, SequenceRows


class TextRows(NamedTuple):
    """The KV rows of a text; those of its newest token are computed, and rows for the draft are reserved."""

    kv: KvSequence
    left_out: int = 0  # rows of the text that `kv` leaves out


class LevelDrafter(Drafter):
    """Drafts chains, or trees of `width` nodes per level. Every level is one pass over the newest nodes."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._buffers = BatchBuffers()

    @abstractmethod
    def _rows_of(self, request: DraftRequest) -> TextRows:
        """Return the KV rows to which draft tokens attend, and where they write theirs."""

    @abstractmethod
    def _forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run a pass; return logits of the target's ids."""

    def _grow(
        self,
        trees: Sequence[GrowingTree],
        logits: Tensor,
        cache: PagedCache,
        began: "torch.cuda.Event | None",
    ) -> None:
        """Grow all trees to their limits; `logits` are those after their texts. `began`: start of the device's work."""
        if self._width == 1 and all(map(can_draw_on_device, trees)):
            self._grow_on_device(trees, logits, cache, began)
            return
        while trees:
            if self._width == 1:
                grow_chains(trees, logits)
            else:
                grow_trees(trees, logits)
            trees = [tree for tree in trees if not tree.is_done]
            if trees:
                logits = self._run(trees, [self._newest_level(tree) for tree in trees], cache)

    def _grow_on_device(
        self,
        trees: Sequence[GrowingTree],
        logits: Tensor,
        cache: PagedCache,
        began: "torch.cuda.Event | None",
    ) -> None:
        """Draft chains on the device; the host reads the tokens only after the last level.

        Each level samples one token per growing chain. Until the host reads the tokens, a chain stores their indices in
        the concatenation of all levels.
        """
        growing, num_drawn = list(trees), 0
        levels = [draw_on_device(trees, logits)]  # sampled tokens of each level, [growing chains]
        while growing:
            for row, tree in enumerate(growing):
                tree.grow_unread(num_drawn + row)
            num_drawn += len(growing)
            unfinished = [
                (row, tree)
                for row, tree in enumerate(growing)
                if tree.depth < min(tree.max_nodes, tree.max_depth)
            ]
            growing = [tree for _, tree in unfinished]
            if growing:
                rows = [self._newest_drawn(tree, row) for row, tree in unfinished]
                levels.append(draw_on_device(growing, self._run(growing, rows, cache, levels[-1])))
        source = HostCopy.begin(torch.cat(levels), began)
        source.is_cold = any(tree.is_cold for tree in trees)
        for tree in trees:
            tree.take_unread(source)

    def _newest_level(self, tree: GrowingTree) -> SequenceRows:
        """Return a pass over the nodes of a tree's newest level."""
        kv, left_out = self._rows_of(tree.request)
        draft, first = tree.draft(), tree.frontier[0]
        return SequenceRows(kv, tree.request.tokens, 0, draft, first_node=first, left_out=left_out)

    def _newest_drawn(self, tree: GrowingTree, row: int) -> SequenceRows:
        """Return a pass over the newest token of a chain, which row `row` of the previous level has sampled."""
        kv, left_out = self._rows_of(tree.request)
        first, tokens = kv.computed + tree.depth - 1, tree.request.tokens
        return SequenceRows(kv, tokens, 1, NO_DRAFT, first=first, drawn_at=(row,), left_out=left_out)

    def _run(
        self,
        trees: Sequence[GrowingTree],
        rows: Sequence[SequenceRows],
        cache: PagedCache,
        drawn_before: Tensor | None = None,
    ) -> Tensor:
        """Run a pass over `rows`; return its logits. `drawn_before` has sampled tokens that the host has not read."""
        batch = self._buffers.lay_out(cache, rows, ())
        output = self._forward(batch if drawn_before is None else batch.after(drawn_before))
        for tree in trees:
            tree.is_cold |= output.is_cold
        return output.logits
