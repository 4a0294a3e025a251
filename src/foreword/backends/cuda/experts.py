"""A layer's mixture of experts on Triton kernels."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from foreword.backends.cuda.kernels.experts import Experts, expert_down, expert_gate_up
from foreword.backends.cuda.kernels.linear import Tile, linear
from foreword.backends.cuda.kernels.mxfp4 import PackedExperts
from foreword.backends.cuda.kernels.routing import ExpertBlocks, route, sort_by_expert
from foreword.backends.torch.weights import ExpertWeights
from foreword.kernels.recording import is_recording
from foreword.models.config import MlpSpec

ROUTER_PARTS = 8
"""Maximum parts of a router's K: its few columns alone do not occupy a GPU."""

LEAST_ROUTER_PART = 128
"""Minimum depth of a part of K; splitting further gains nothing."""


class Mixture:
    """The routed experts of one layer."""

    def __init__(self, mlp: MlpSpec, weights: ExpertWeights[Experts]) -> None:
        assert mlp.experts is not None
        self._mlp, self._spec, self._weights = mlp, mlp.experts, weights
        dtype = weights.gate_up.dtype
        # If the router was stored in the dtype of the other weights, tensor cores compute it in that dtype.
        narrow = weights.router.to(dtype)
        self._router = narrow if torch.equal(narrow.float(), weights.router) else weights.router
        self._ranks = torch.arange(mlp.experts.per_token, dtype=torch.int32, device=weights.router.device)
        # Called with the chosen experts, int32 [rows, per token]
        self.observe: Callable[[Tensor], None] | None = None

    @property
    def per_token(self) -> int:
        """Experts per row."""
        return self._spec.per_token

    @property
    def shared_gate(self) -> Tensor | None:
        """Weights [1, hidden] of the shared expert's gate; None: it has no gate."""
        return self._weights.shared_gate

    def forward(self, normed: Tensor, slots: Tensor, spare_slot: int, parts: Tensor) -> None:
        """Write the outputs of every row's experts to `parts`, float32 [per token, rows, hidden].

        Rows that write to `spare_slot` are padding: they have no experts, and their parts are not written.
        """
        spec, weights = self._spec, self._weights
        logits = self._logits(normed)
        chosen, shares, counts = route(logits, weights, spec, slots, spare_slot)
        if self.observe is not None and not is_recording():
            self.observe(chosen)
        tile = tile_for(chosen.numel(), spec.count, isinstance(weights.gate_up, PackedExperts))
        if len(normed) == 1:  # each of the row's experts is a block; nothing is to be sorted
            blocks = ExpertBlocks(self._ranks, chosen[0], self._ranks, counts[0], tile.rows)
        else:
            blocks = sort_by_expert(chosen, spec.count, tile.rows)
        active = normed.new_empty((chosen.numel(), spec.size))
        expert_gate_up(normed, weights, blocks, self._mlp, active, tile)
        expert_down(active, weights, blocks, shares, parts, tile)

    def _logits(self, normed: Tensor) -> Tensor:
        """Return the router's logits in parts, float32 [parts, rows, experts], to be added in this order."""
        rows, depth = normed.shape
        parts = ROUTER_PARTS
        while parts > 1 and (depth % (parts * 16) or depth // parts < LEAST_ROUTER_PART):
            parts //= 2
        tile = Tile(16, 16, 128) if rows <= 256 else Tile(64, 64, 64)
        out = torch.empty((parts, rows, self._spec.count), dtype=torch.float32, device=normed.device)
        return linear(normed.to(self._router.dtype), self._router, None, out, tile, depth // parts)


def tile_for(pairs: int, experts: int, packed: bool = False) -> Tile:
    """Return the fastest tile on an H200 for a number of (row, expert) pairs; `packed`: weights in MXFP4."""
    mean = pairs / experts
    if mean <= 8:
        tile = Tile(16, 64, 256 if packed else 128, stages=4, swapped=True)
    elif mean <= 24:
        tile = Tile(32, 64, 128, stages=4, swapped=True)
    elif mean <= 64:
        tile = Tile(64, 128, 64, stages=4)
    else:
        tile = Tile(128, 256, 64, warps=8, stages=4)
    # Tensor cores read unpacked numbers from registers, which only one side of a product may be in.
    return replace(tile, columns=min(tile.columns, 128), swapped=True) if packed else tile
