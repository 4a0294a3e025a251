"""The convolution and recurrence of a recurrent layer on Triton kernels."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foreword.backends.cuda.kernels.convolution import ConvolutionInputs, convolve, gated_convolution
from foreword.backends.cuda.kernels.gates import norm_and_gate, sum_decays
from foreword.backends.cuda.kernels.moves import move_rows
from foreword.backends.cuda.kernels.recurrence import RingRows, recur
from foreword.backends.cuda.kernels.recurrence_chunks import recur_chunks
from foreword.backends.cuda.layout import DECODE_ROWS
from foreword.backends.cuda.state_plan import UploadedStates
from foreword.backends.torch.recurrent import KEY_EPS
from foreword.backends.torch.recurrent_rows import RecurrentStore
from foreword.backends.torch.weights import RecurrentWeights
from foreword.kv.chunks import CHUNK
from foreword.models.config import Recurrence, RecurrentSpec

MOST_EMPTY = 2
"""Maximum positions of a pass's chunks, per row, for computing all chunks at once: empty positions take memory, too."""


@dataclass(frozen=True)
class RecurrentPass:
    """Inputs of a pass's recurrent layers other than their projections."""

    store: RecurrentStore
    plan: UploadedStates
    positions: Tensor  # int32 [rows]
    # int32 [rows, MAX_DRAFT_NODES], indices of each node's ancestors in its draft; None: no draft branches
    ancestors: Tensor | None

    @property
    def has_full_chunks(self) -> bool:
        """Return whether the pass is not captured, no draft branches, and most chunks are at least half full."""
        rows = len(self.positions)
        return (
            rows > DECODE_ROWS[-1]
            and self.ancestors is None
            and self.plan.num_segments * CHUNK <= MOST_EMPTY * rows
        )


def move_ring(store: RecurrentStore, plan: UploadedStates) -> None:
    """Copy the plan's `ring_copies` in all layers; all rows are read before any is written."""
    if len(plan.ring_copies):
        for array in store.ring:
            move_rows(array.flatten(2).unsqueeze(2), plan.ring_copies)


def by_tap(weights: RecurrentWeights) -> RecurrentWeights:
    """Return the weights with those of the convolution as [kernel, channels], as kernels load them."""
    return replace(weights, conv=weights.conv.T.contiguous())


def mix_positions(
    spec: RecurrentSpec,
    weights: RecurrentWeights,
    projected: Tensor,
    eps: float,
    recurrent_pass: RecurrentPass,
    layer: int,
) -> Tensor:
    """Return a recurrent layer's output, [rows, values], before its output projection; store ring rows and states.

    `projected` are all input projections; `layer` is the index among the recurrent layers; `weights` are `by_tap`.
    """
    plan, ring, states = recurrent_pass.plan, recurrent_pass.store.ring, recurrent_pass.store.states
    inputs = ConvolutionInputs(
        plan.windows, plan.ring_to, plan.state_to, ring.inputs[layer], states.inputs[layer]
    )
    rows = len(projected)
    out = projected.new_empty((rows, spec.value_width))
    if spec.kind is Recurrence.NONE:
        return gated_convolution(projected, inputs, weights.conv, weights.conv_bias, out)
    assert weights.decay is not None
    assert weights.time_bias is not None
    assert weights.norm is not None
    is_delta = spec.kind is Recurrence.DELTA
    queries, keys = projected.new_empty((2, rows, spec.key_heads, spec.key_dim))
    values = projected.new_empty((rows, spec.value_width))
    convolve(
        projected, inputs, weights.conv, weights.conv_bias, ring.keys[layer], (queries, keys, values),
        KEY_EPS if is_delta else None,
    )  # fmt: skip
    decays, strengths = torch.empty((2, rows, spec.heads), dtype=torch.float32, device=out.device)
    sum_decays(
        projected,
        spec.channels + spec.value_width,
        (weights.decay, weights.time_bias),
        (recurrent_pass.positions, plan.windows, plan.ring_to),
        (plan.segments.firsts, plan.segments.counts),
        (decays, ring.decays[layer], strengths),
        None if is_delta else spec.time_limits,
    )
    updates = projected.new_empty((rows, spec.heads, spec.value_dim))
    outputs = torch.empty(updates.shape, dtype=torch.float32, device=out.device)
    inputs_of_rows = (
        (queries, keys, values),
        strengths,
        RingRows(keys, updates, decays),
        RingRows(ring.keys[layer], ring.updates[layer], ring.decays[layer]),
        states.matrix[layer],
        weights.skip,
        plan.segments,
    )
    if recurrent_pass.has_full_chunks:
        recur_chunks(*inputs_of_rows, plan.num_segments, plan.ring_to, outputs)
    else:
        recur(*inputs_of_rows, (recurrent_pass.positions, plan.ring_to), recurrent_pass.ancestors, outputs)
    groups = None if is_delta else spec.norm_groups
    return norm_and_gate(outputs, projected, spec.channels, weights.norm, eps, groups, out)
