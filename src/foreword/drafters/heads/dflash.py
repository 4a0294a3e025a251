"""DFlash: a block of masks behind the newest token is filled in one pass that sees the target's hidden states."""

from collections.abc import Sequence

import numpy as np
import torch

from foreword.backends.batch import BatchArrays
from foreword.backends.interface import HeadInput, HeadOutput
from foreword.drafters.heads.at_once import guess_at_once
from foreword.drafters.heads.in_pages import HeadInPages, Run
from foreword.drafters.heads.loading import HeadConfig, LoadedHead, load_head
from foreword.drafters.resources import DrafterResources
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Ask, RequestRows
from foreword.speculation.rows.layout import SequenceRows

LAG = 0
"""The row of a token is made from its own states. The newest token has none yet: it begins the block."""


class DFlashHead(HeadInPages):
    """Its rows hold what the target thought of committed tokens; those of a block are gone with the guess.

    A block always has the size that the head was trained with: its rows see each other.
    """

    def __init__(self, head: LoadedHead, width: int) -> None:
        super().__init__(head, LAG, scratch=head.spec.block_size)
        assert head.spec.mask_token_id is not None
        self._mask, self._spec, self._width = head.spec.mask_token_id, head.spec, width

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """A chain, or a tree of `tree_width`; none where states of the newest committed tokens are not known."""
        drafts = [Draft()] * len(asks)
        pages = {index: found for index, ask in enumerate(asks) if (found := self._ready(ask)) is not None}
        if not pages:
            return drafts
        asked = [asks[index] for index in pages]
        self._fill(asked)
        parts = [self._block(ask, found) for ask, found in zip(asked, pages.values(), strict=True)]
        first = next(iter(pages.values()))
        arrays = self._buffers.lay_out(first.cache, parts, ()).arrays
        if not self._spec.is_causal:
            _see_all(arrays, parts)
        starts = np.array([self._rows_of(found).begin for found in pages.values()], np.int32)
        nothing = torch.empty(len(arrays.token_ids), 0)
        output = self._runner.forward(HeadInput(arrays, starts, nothing, are_own=True), first.store)
        places = [len(part.draft) + part.run_logits for part in parts]
        for index, draft in zip(pages, self._guess(asked, places, output), strict=True):
            drafts[index] = draft
        return drafts

    def _guess(self, asks: Sequence[Ask], places: Sequence[int], output: HeadOutput) -> list[Draft]:
        return guess_at_once(asks, places, output.logits, self._vocabulary, self._width)

    def _ready(self, ask: Ask) -> RequestRows | None:
        """The pages of a request that can be guessed for."""
        if ask.pages is None or ask.max_nodes < 1 or ask.max_depth < 1:
            return None
        rows, end = self._rows_of(ask.pages), len(ask.request.tokens) - 1
        is_known = rows.known >= end and rows.first_known <= min(rows.missing_from(LAG), end)
        has_room = ask.pages.kv.reserved >= end + 2
        return ask.pages if is_known and has_room and end > 0 else None

    def _fill(self, asks: Sequence[Ask]) -> None:
        """Make the rows of committed tokens that have none yet."""
        runs = []
        for ask in asks:
            assert ask.pages is not None
            rows, end = self._rows_of(ask.pages), len(ask.request.tokens) - 1
            if (first := rows.missing_from(LAG)) < end:
                runs.append(Run(ask.pages, rows, ask.request.tokens, first, end, LAG))
        if runs:
            self._run_true(runs, wanted=0)

    def _block(self, ask: Ask, pages: RequestRows) -> SequenceRows:
        """The newest token and the masks behind it, fewer where there is no memory for all."""
        tokens = ask.request.tokens
        masks = min(self._spec.block_size - 1, pages.kv.reserved - len(tokens))
        return SequenceRows(
            pages.kv,
            tokens,
            1,
            Draft.chain([self._mask] * masks, len(tokens)),
            run_logits=int(self._spec.anchor_guesses),
            first=len(tokens) - 1,
        )


def _see_all(arrays: BatchArrays, parts: Sequence[SequenceRows]) -> None:
    """Let all rows of a block see all of it."""
    row = 0
    for part in parts:
        rows = 1 + len(part.draft)
        arrays.ancestor_masks.view(np.uint64)[row : row + rows, 0] = (1 << len(part.draft)) - 1
        row += rows


def build_dflash(config: HeadConfig, resources: DrafterResources) -> DFlashHead:
    """Load the head beside the target."""
    return DFlashHead(load_head(config.model, "dflash", resources), config.tree_width)
