"""Drafters that fill a block of mask tokens in one pass: DFlash, DFlash2 and DSpark."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from foreword.backends.batch import BatchArrays, Ints
from foreword.backends.interface import HeadCall, HeadInput, HeadOutput
from foreword.drafters.heads.chains import drafts_of_chains, plan_chains
from foreword.drafters.heads.growing import draft_at_once, grow_levels, new_trees
from foreword.drafters.heads.in_pages import HeadInPages, mark_computed
from foreword.drafters.heads.loading import (
    LoadedHead,
    WindowedHeadConfig,
    draft_where_ready,
    head_drafter_kind,
    load_head,
)
from foreword.drafters.registry import drawn_kind
from foreword.drafters.trees import HeadTree
from foreword.errors import RequestError
from foreword.kv.paged_cache import PagedCache
from foreword.models.heads.spec import CONFIDENCE
from foreword.speculation.draft import ROOT, Draft, mark_cold
from foreword.speculation.drafting import DraftTask, RequestRows
from foreword.speculation.layout import SequenceRows
from foreword.speculation.settings import Limit, setting

STATE_OFFSET = 0
"""A token's row is computed from its own states. The newest token has none yet: it starts the block."""


class DFlashHead(HeadInPages):
    """Drafts a block of tokens in one pass.

    Rows of committed tokens are computed from the target's states; rows of a block are discarded after the draft. A
    block always has its training size, because its rows attend to each other.
    """

    def __init__(self, head: LoadedHead, width: int) -> None:
        super().__init__(head, STATE_OFFSET, scratch=head.spec.block_size)
        self._runner = head.runner
        self.traits = replace(self.traits, acceptance_by_level=head.acceptance_by_level)
        assert head.spec.mask_token_id is not None
        self._mask, self._spec, self._width = head.spec.mask_token_id, head.spec, width
        self._in_one_call = width == 1  # request whole chains; a runner without support returns logits

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Return a chain, or a tree of `tree_width`; empty if states of committed tokens are missing."""
        return draft_where_ready(tasks, list(map(self._ready_pages, tasks)), self._fill_and_draft)

    def _fill_and_draft(self, tasks: list[DraftTask], pages: list[RequestRows]) -> Sequence[Draft]:
        """Compute the missing rows of committed tokens, and draft."""
        ranges, starts = self._missing(tasks, pages)
        context = self._rows_from_target(ranges, num_logits=0) if ranges else None
        blocks = [self._block(task, task_pages) for task, task_pages in zip(tasks, pages, strict=True)]
        position_counts = [
            min(len(block.draft) + self._spec.anchor_drafts, task.max_depth, task.max_nodes)
            for task, block in zip(tasks, blocks, strict=True)
        ]
        rows = self._block_rows(pages[0].cache, blocks, position_counts, starts)
        plan = plan_chains(tasks, position_counts, self._vocabulary) if self._in_one_call else None
        output = self._runner.draft(HeadCall(rows, pages[0].store, plan, context))
        mark_computed(ranges)
        if not isinstance(output, HeadOutput):
            return drafts_of_chains(tasks, output)
        return mark_cold(self._draft(tasks, position_counts, output), output.is_cold)

    def _block_rows(
        self, cache: PagedCache, blocks: Sequence[SequenceRows], position_counts: Sequence[int], starts: Ints
    ) -> HeadInput:
        """Return the rows of all blocks; in block i, the first `position_counts[i]` drafting rows have logits."""
        arrays = self._buffers.lay_out(cache, blocks, ()).arrays
        if not self._spec.is_causal:
            _attend_to_whole_blocks(arrays, blocks)
        firsts = arrays.row_starts[:-1] + int(not self._spec.anchor_drafts)
        logit_rows = [
            np.arange(first, first + count) for first, count in zip(firsts, position_counts, strict=True)
        ]
        arrays = arrays._replace(logit_rows=np.concatenate(logit_rows).astype(np.int32))
        no_states = torch.empty(len(arrays.token_ids), 0)  # the rows of a block read only their tokens
        return HeadInput(arrays, starts, no_states, are_own=True)

    def _draft(
        self, tasks: Sequence[DraftTask], position_counts: Sequence[int], output: HeadOutput
    ) -> list[Draft]:
        """Return the drafts of the output for all blocks."""
        return draft_at_once(tasks, position_counts, output.logits, self._vocabulary, self._width)

    def _ready_pages(self, task: DraftTask) -> RequestRows | None:
        """Return the request's pages; None if it has no token before the newest, or no room for a draft."""
        pages, end = self._known_pages(task), len(task.request.tokens) - 1
        return pages if pages is not None and pages.kv.reserved >= end + 2 and end > 0 else None

    def _block(self, task: DraftTask, pages: RequestRows) -> SequenceRows:
        """Return the newest token followed by mask tokens, fewer if too few KV rows are reserved."""
        tokens = task.request.tokens
        count = min(self._spec.block_size - 1, pages.kv.reserved - len(tokens))
        masks = Draft.chain([self._mask] * count, len(tokens))
        return SequenceRows(pages.kv, tokens, 1, masks, first=len(tokens) - 1)


def _attend_to_whole_blocks(arrays: BatchArrays, blocks: Sequence[SequenceRows]) -> None:
    """Set the ancestor masks such that all rows of a block attend to the whole block."""
    first = 0
    for block in blocks:
        end = first + 1 + len(block.draft)
        arrays.ancestor_masks.view(np.uint64)[first:end, 0] = (1 << len(block.draft)) - 1
        first = end


DFLASH = head_drafter_kind("dflash", "a head that fills a block of masks in one pass", DFlashHead)


@dataclass(frozen=True)
class DSparkConfig(WindowedHeadConfig):
    """Settings of a DSpark head."""

    confidence: float = setting(
        0.0,
        "a draft ends before the first position with lower confidence",
        Limit("at least 0 and below 1", lambda value: 0 <= value < 1),
    )


class DependentBlockHead(DFlashHead):
    """A DFlash head in which each position also depends on the token before it (DFlash2, DSpark)."""

    def _draft(
        self, tasks: Sequence[DraftTask], position_counts: Sequence[int], output: HeadOutput
    ) -> list[Draft]:
        """Return drafts in which each token depends on the token before."""
        trees, firsts = new_trees(tasks, position_counts, self._width)

        def logits(growing: Sequence[HeadTree], rows: list[int]) -> Tensor:
            tokens = [token for tree in growing for token in _newest_tokens(tree)]
            after = self._runner.logits_after(tokens, output.logits[rows], output.states[rows])
            return self._vocabulary.spread(after)

        def may_grow(tree: HeadTree, row: int) -> bool:
            return self._may_grow(tree, output.states[row])

        grow_levels(trees, firsts, logits, self._width > 1, may_grow)
        return [tree.draft() for tree in trees]

    def _may_grow(self, tree: HeadTree, state: Tensor) -> bool:
        """Return whether the tree gets another level; `state` [hidden] is the head's state of its position."""
        return True


class DSparkHead(DependentBlockHead):
    """A block head with a Markov head, and perhaps a confidence head that ends drafts."""

    def __init__(self, head: LoadedHead, width: int, confidence: float) -> None:
        super().__init__(head, width)
        # The confidence head, [1, inputs] and [1]; None: the file has none.
        self._confidence_weight = head.tensors.get(CONFIDENCE + ".weight")
        self._confidence_bias = head.tensors.get(CONFIDENCE + ".bias")
        self._min_confidence = confidence
        if confidence > 0 and self._confidence_weight is None:
            raise RequestError("confidence: this head has no confidence head; leave it out")
        self._in_one_call &= confidence == 0

    def _may_grow(self, tree: HeadTree, state: Tensor) -> bool:
        if self._min_confidence == 0:
            return True
        embedded = self._runner.markov_embeddings(_newest_tokens(tree))
        return bool((self._confidences(state, embedded) >= self._min_confidence).any())

    def _confidences(self, state: Tensor, embedded: Tensor) -> Tensor:
        """Return the probability that the token after each node is accepted, [nodes].

        `state` [hidden] is that of the next position, `embedded` [nodes, rank] has the nodes' Markov embeddings.
        """
        assert self._confidence_weight is not None
        features = state.float().expand(len(embedded), -1)
        if self._confidence_weight.shape[1] > features.shape[1]:
            features = torch.cat((features, embedded), dim=-1)
        bias = 0.0 if self._confidence_bias is None else self._confidence_bias
        return torch.sigmoid(features @ self._confidence_weight[0] + bias)


def _newest_tokens(tree: HeadTree) -> list[int]:
    """Return the tokens of the newest nodes; for the root, the text's last token."""
    return [tree.request.tokens[-1] if node == ROOT else tree.tokens[node] for node in tree.frontier]


DFLASH2 = head_drafter_kind(
    "dflash2",
    "a DFlash head that selects one of the best candidates of a position by the token before it",
    DependentBlockHead,
)

DSPARK = drawn_kind(
    DSparkHead,
    "a DFlash head with a Markov head over the tokens of a block",
    DSparkConfig,
    lambda config, resources: DSparkHead(
        load_head(config, "dspark", resources), config.tree_width, config.confidence
    ),
)
