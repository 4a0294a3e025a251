"""Medusa's heads on a GPU: a captured graph computes and draws all positions of all requests."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foreword.acceptance.noise import extend_keys
from foreword.acceptance.transfer import started
from foreword.backends.cuda.draws import DraftIds, as_chains, draw_ids, vocabulary_key, words
from foreword.backends.cuda.graphs import GraphCache
from foreword.backends.cuda.layout import padded_rows
from foreword.backends.interface import ChainPlan, Chains, HeadOutput, MedusaCall, PendingChains
from foreword.backends.torch.head_factory import TorchMedusa
from foreword.backends.torch.heads import TargetMatrices
from foreword.backends.torch.upload import Piece, Upload
from foreword.models.heads.opening import Head

_MOST_ROWS = 64
"""Maximum requests of a captured pass; more keep the device busy without a graph."""

_ENTRIES = 1 << 14
"""Upper bound of the 32-bit numbers that a pass reads."""


@dataclass(frozen=True)
class MedusaShape:
    """Key of a captured pass: everything that is fixed at capture."""

    rows: int
    heads: int  # number of heads that are computed, from the first on
    draws: bool  # whether tokens are sampled; False: the pass returns logits
    vocabulary: Hashable = None  # identifies the draft vocabulary


class CudaMedusa:
    """The torch reference's computation as one captured graph."""

    def __init__(self, head: Head, target: TargetMatrices, *, captures: bool) -> None:
        self._reference = TorchMedusa(head, target)
        self.spec, self.weight_bytes = head.spec, self._reference.weight_bytes
        self._captures = captures
        self._states = torch.zeros(
            (_MOST_ROWS, head.spec.hidden_size), dtype=target.dtype, device=target.device
        )
        self._upload = Upload(target.device, _ENTRIES)
        self._ids = DraftIds(head.spec.draft_vocab_size, target.device)
        self._graphs: GraphCache[MedusaShape, Tensor] = GraphCache()

    @torch.inference_mode()
    def draft(self, call: MedusaCall) -> HeadOutput | Chains:
        """Return the planned chains, or logits and states, which are valid until the next pass."""
        states, target_ids = call.states, None if call.plan is None else self._ids.of(call.plan)
        if len(states) > _MOST_ROWS:
            return self._reference.draft(call)
        if call.plan is not None and target_ids is not None:
            return self._chains(states, call.plan, target_ids)
        fixed_states = self._copy_states(states)
        shape = MedusaShape(len(fixed_states), self.spec.num_heads, draws=False)

        def body() -> Tensor:
            return self._reference.logits(fixed_states, shape.heads)

        logits, is_cold = self._run(shape, body)
        return HeadOutput(logits[:, : len(states)].transpose(0, 1), states, is_cold)

    def _chains(self, states: Tensor, plan: ChainPlan, target_ids: Tensor) -> PendingChains:
        heads = int(plan.steps.max())
        start_event = started(states.device)
        fixed_states = self._copy_states(states)
        shape = MedusaShape(len(fixed_states), heads, draws=True, vocabulary=vocabulary_key(plan))
        keys = extend_keys(plan.records["stem"], plan.lengths + np.arange(heads)[:, None])
        pieces = [
            Piece(words(keys), (heads, 2 * shape.rows), 0),
            Piece(words(plan.records["temperature"].astype(np.float64)), (2 * shape.rows,), 0),
        ]
        uploaded = self._upload.copy(pieces)
        noise, temperature = uploaded[0].view(torch.int64), uploaded[1].view(torch.float64)

        def body() -> Tensor:
            logits = self._reference.logits(fixed_states, heads).flatten(0, 1)
            temperatures = temperature.repeat(heads)
            return draw_ids(logits, temperatures, noise.flatten(), target_ids).view(heads, shape.rows)

        drawn, is_cold = self._run(shape, body)
        return as_chains(drawn, plan.steps, start_event, is_cold)

    def _copy_states(self, states: Tensor) -> Tensor:
        """Copy states to the memory that captured passes read; padding rows keep old values."""
        self._states[: len(states)] = states
        return self._states[: padded_rows(len(states))]

    def _run(self, shape: MedusaShape, body: Callable[[], Tensor]) -> tuple[Tensor, bool]:
        return self._graphs.run(shape, body) if self._captures else (body(), False)
