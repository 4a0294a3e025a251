"""DFlash: fills a block of mask tokens in one pass. DSpark: adds a Markov head on the previous token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from foreword.backends.batch import BatchArrays, Ints
from foreword.backends.interface import HeadCall, HeadInput, HeadOutput
from foreword.drafters.heads.chains import drafts_of_chains, plan_chains
from foreword.drafters.heads.growing import draft_at_once, grow_levels, new_trees
from foreword.drafters.heads.in_pages import HeadInPages, fill
from foreword.drafters.heads.loading import (
    HEAD,
    LoadedHead,
    WindowedHeadConfig,
    drafts_where,
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
        self._in_one_call = width == 1  # if the runner supports it

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Return a chain, or a tree of `tree_width`; empty if states of committed tokens are missing."""
        return drafts_where(tasks, list(map(self._ready, tasks)), self._fill_and_draft)

    def _fill_and_draft(self, tasks: list[DraftTask], pages: list[RequestRows]) -> Sequence[Draft]:
        runs, starts = self._missing(tasks, pages)
        context = self._rows_from_target(runs, wanted=0) if runs else None
        parts = [self._block(task, found) for task, found in zip(tasks, pages, strict=True)]
        places = [
            min(len(part.draft) + self._spec.anchor_drafts, task.max_depth, task.max_nodes)
            for task, part in zip(tasks, parts, strict=True)
        ]
        blocks = self._block_rows(pages[0].cache, parts, places, starts)
        store = pages[0].store
        plan = plan_chains(tasks, places, self._vocabulary) if self._in_one_call else None
        output = self._runner.draft(HeadCall(blocks, store, plan, context))
        fill(runs)
        if not isinstance(output, HeadOutput):
            return drafts_of_chains(tasks, output)
        return mark_cold(self._draft(tasks, places, output), output.is_cold)

    def _block_rows(
        self, cache: PagedCache, parts: Sequence[SequenceRows], places: Sequence[int], starts: Ints
    ) -> HeadInput:
        """Return the rows of all blocks; logits are computed for the first `places` of each."""
        arrays = self._buffers.lay_out(cache, parts, ()).arrays
        if not self._spec.is_causal:
            _see_all(arrays, parts)
        firsts = arrays.row_starts[:-1] + int(not self._spec.anchor_drafts)
        wanted = [np.arange(first, first + count) for first, count in zip(firsts, places, strict=True)]
        arrays = arrays._replace(logit_rows=np.concatenate(wanted).astype(np.int32))
        return HeadInput(arrays, starts, torch.empty(len(arrays.token_ids), 0), are_own=True)

    def _draft(self, tasks: Sequence[DraftTask], places: Sequence[int], output: HeadOutput) -> list[Draft]:
        return draft_at_once(tasks, places, output.logits, self._vocabulary, self._width)

    def _ready(self, task: DraftTask) -> RequestRows | None:
        """Return the request's pages if a draft is possible."""
        pages, end = self._known_pages(task), len(task.request.tokens) - 1
        return pages if pages is not None and pages.kv.reserved >= end + 2 and end > 0 else None

    def _block(self, task: DraftTask, pages: RequestRows) -> SequenceRows:
        """Return the newest token followed by masks, fewer if memory is short."""
        tokens = task.request.tokens
        masks = min(self._spec.block_size - 1, pages.kv.reserved - len(tokens))
        return SequenceRows(
            pages.kv,
            tokens,
            1,
            Draft.chain([self._mask] * masks, len(tokens)),
            first=len(tokens) - 1,
        )


def _see_all(arrays: BatchArrays, parts: Sequence[SequenceRows]) -> None:
    """Let all rows of a block attend to the whole block."""
    row = 0
    for part in parts:
        rows = 1 + len(part.draft)
        arrays.ancestor_masks.view(np.uint64)[row : row + rows, 0] = (1 << len(part.draft)) - 1
        row += rows


DFLASH = head_drafter_kind("dflash", "a head that fills a block of masks in one pass", DFlashHead)


@dataclass(frozen=True)
class DSparkConfig(WindowedHeadConfig):
    """Settings of a DSpark head."""

    confidence: float = setting(
        0.0,
        "a draft ends before the first position with lower confidence",
        Limit("at least 0 and below 1", lambda value: 0 <= value < 1),
    )


class DSparkHead(DFlashHead):
    """A DFlash head in which each position also depends on the previous token."""

    def __init__(self, head: LoadedHead, width: int, confidence: float) -> None:
        super().__init__(head, width)
        self._sureness = head.own.get(CONFIDENCE + ".weight")
        self._bias = head.own.get(CONFIDENCE + ".bias")
        self._confidence = confidence
        if confidence > 0 and self._sureness is None:
            raise RequestError("confidence: this head has no confidence head; leave it out")
        self._in_one_call &= confidence == 0

    def _draft(self, tasks: Sequence[DraftTask], places: Sequence[int], output: HeadOutput) -> list[Draft]:
        trees, firsts = new_trees(tasks, places, self._width)

        def level(going: Sequence[HeadTree], rows: list[int]) -> Tensor:
            before = self._runner.markov_before([token for tree in going for token in _tokens(tree)])
            return self._vocabulary.spread(output.logits[rows] + self._runner.markov_after(before))

        def is_worth(tree: HeadTree, row: int) -> bool:
            if self._confidence == 0:
                return True
            sure = self._sure(output.states[row], self._runner.markov_before(_tokens(tree)))
            return bool((sure >= self._confidence).any())

        grow_levels(trees, firsts, level, self._width > 1, is_worth)
        return [tree.draft() for tree in trees]

    def _sure(self, state: Tensor, before: Tensor) -> Tensor:
        """Return the probability that the token after each node is accepted, [nodes]."""
        assert self._sureness is not None
        read = state.float().expand(len(before), -1)
        if self._sureness.shape[1] > read.shape[1]:
            read = torch.cat((read, before), dim=-1)
        bias = 0.0 if self._bias is None else self._bias
        return torch.sigmoid(read @ self._sureness[0] + bias)


def _tokens(tree: HeadTree) -> list[int]:
    """Return the tokens of the newest nodes; for the root, the text's last token."""
    return [tree.request.tokens[-1] if node == ROOT else tree.tokens[node] for node in tree.frontier]


DSPARK = drawn_kind(
    "a DFlash head with a Markov head over the tokens of a block",
    DSparkConfig,
    lambda config, resources: DSparkHead(
        load_head(config, "dspark", resources), config.tree_width, config.confidence
    ),
    traits=HEAD,
)
