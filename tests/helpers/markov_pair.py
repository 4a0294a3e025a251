"""Two pretend decoders whose logits follow from the last two tokens: a target, and one that drafts for it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from foreword.backends.batch import BatchArrays, ForwardBatch, ForwardOutput
from foreword.kv.chunks import NO_STATES, StateSizes
from foreword.kv.spec import RowSpec
from helpers.pretend_store import PRETEND_ROWS, PretendStore

VOCAB = 3
PEAK, NOISE = 2.1, 0.4
"""Logits at temperature 1: how far the likeliest token stands out, and how far the others differ."""

TEMPERATURE = 1.25


class MarkovDecoder:
    """Keeps tokens in its KV rows and reads a row's two newest back through pages and masks."""

    def __init__(self, logits: np.ndarray) -> None:
        """`logits` [vocab, vocab, own vocab], by the last token but one and the last; ids beyond are padding."""
        self.logits = logits.astype(np.float32)
        self.config: Any = SimpleNamespace(
            num_layers=1, recurrent=None, vocab_size=logits.shape[2], context_length=64
        )
        self.device = torch.device("cpu")
        self._memory = np.empty(0, np.int64)
        self._page_size = 0

    def kv_rows(self) -> RowSpec:
        return PRETEND_ROWS

    def state_spec(self) -> None:
        """It has no recurrent layers."""

    def new_kv_store(
        self, num_pages: int, page_size: int, extra: Sequence[RowSpec] = (), states: StateSizes = NO_STATES
    ) -> PretendStore:
        self._page_size = page_size
        self._memory = np.full(num_pages * page_size, -(10**9))
        return PretendStore(num_pages, page_size, extra)

    def forward(self, batch: ForwardBatch, _store: object) -> ForwardOutput:
        arrays = batch.arrays
        self._memory[arrays.kv_copies[:, 1]] = self._memory[arrays.kv_copies[:, 0]]
        self._memory[arrays.slots] = arrays.token_ids
        wanted = arrays.logit_rows
        owner = np.searchsorted(arrays.row_starts, wanted, side="right") - 1
        before = np.array([row_before(arrays, row) for row in wanted], np.int64)
        pages = arrays.block_tables[owner, before // self._page_size]
        tokens = self._memory[pages * self._page_size + before % self._page_size]
        return ForwardOutput(torch.from_numpy(self.logits[tokens, arrays.token_ids[wanted]]), {})


def row_before(arrays: BatchArrays, row: int) -> int:
    """The logical KV row of the token in front of a row's own."""
    prefix, mask = int(arrays.prefix_lens[row]), int(arrays.ancestor_masks[row, 0])
    if not mask:
        return prefix - 2
    others = mask & ~(1 << (mask.bit_length() - 1))
    return prefix + others.bit_length() - 1


def next_token_law(target: MarkovDecoder, temperature: float) -> np.ndarray:
    """[vocab, vocab, vocab], what the target says after any two tokens."""
    weights = np.exp(target.logits.astype(np.float64) / temperature)
    law: np.ndarray = weights / weights.sum(axis=-1, keepdims=True)
    return law


def peaked_logits(seed: int, padding: int = 0) -> np.ndarray:
    """[3, 3, 3 + padding]: one token has about 0.8 after any two, which one depends on both; padding has most."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.0, NOISE, (VOCAB, VOCAB, VOCAB + padding))
    before, last = np.indices((VOCAB, VOCAB))
    logits[before, last, (before + 2 * last) % VOCAB] += PEAK
    logits[:, :, VOCAB:] += PEAK
    return logits * TEMPERATURE
