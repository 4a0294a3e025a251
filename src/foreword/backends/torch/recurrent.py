"""Recurrent layers in plain torch: the reference that all kernels are tested against.

A row is computed from the state before its chunk and from the rows of its ancestors in the chunk. So prompts, decoded
tokens, chains and trees have one formula, which is in docs/design.md.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from foreword.backends.torch.norms import SINGLE_RANK, Exchange, rms_norm
from foreword.backends.torch.recurrent_rows import (
    LayerState,
    RecurrentStore,
    RequestPass,
    RingArrays,
    Segment,
)
from foreword.backends.torch.weights import RecurrentWeights
from foreword.models.config import Recurrence, RecurrentSpec

KEY_EPS = 1e-6
"""Added to the sum of squares when keys and queries are normalised. Configs do not contain it."""


@dataclass(frozen=True)
class LayerStates:
    """States and rings of one layer during a pass."""

    store: RecurrentStore
    layer: int  # index among the recurrent layers
    requests: list[RequestPass]


def recurrent_mixing(
    spec: RecurrentSpec,
    weights: RecurrentWeights,
    projected: Tensor,
    eps: float,
    states: LayerStates,
    exchange: Exchange = SINGLE_RANK,
) -> Tensor:
    """Return a layer's output before its output projection, [rows, values]; store ring rows and states.

    `projected` are all input projections. The output of padding rows is 0.
    """
    has_state = spec.kind is not Recurrence.NONE
    dtype = torch.float32 if has_state else projected.dtype
    mixed = projected.new_zeros((len(projected), spec.value_width), dtype=dtype)
    store, layer = states.store, states.layer
    for request in states.requests:
        state = store.state(layer, request.read_state)
        ring_rows = store.rows(layer, request.read_ring, request.segments[0].num_ring_rows)
        for index, segment in enumerate(request.segments):
            chunk = _Chunk(spec, weights, state, ring_rows, segment)
            new, mixed[segment.rows] = chunk.rows(projected[segment.rows])
            if index == len(request.segments) - 1:
                store.write_rows(layer, request.write_ring, new)
                break
            state = next_state(spec, state, ring_rows.concatenated(new))
            if (slot := request.next_states[index]) is not None:
                store.write_state(layer, slot, state)
            ring_rows = new.first(0)
    if not has_state:
        return mixed
    assert weights.norm is not None
    gate = projected[:, spec.channels : spec.channels + spec.value_width]
    return _norm_and_gate(spec, weights.norm, mixed, gate, eps, exchange)


def next_state(spec: RecurrentSpec, state: LayerState, rows: RingArrays) -> LayerState:
    """Return the state after all rows of a chunk."""
    inputs = torch.cat((state.inputs, rows.inputs))[-(spec.kernel - 1) :]
    if spec.kind is Recurrence.NONE:
        return LayerState(state.matrix, inputs)
    decay = (rows.decays[-1] - rows.decays).exp()  # [rows, heads]
    keys = _for_heads(rows.keys, spec)
    added = torch.einsum("thk,thv->hkv", keys * decay.unsqueeze(-1), rows.updates)
    return LayerState(rows.decays[-1].exp()[:, None, None] * state.matrix + added, inputs)


@dataclass(frozen=True)
class _Chunk:
    """Computes the new rows of one request in one chunk."""

    spec: RecurrentSpec
    weights: RecurrentWeights
    state: LayerState  # before the chunk
    ring_rows: RingArrays  # earlier rows of the chunk
    segment: Segment  # new rows

    def rows(self, projected: Tensor) -> tuple[RingArrays, Tensor]:
        """Return the ring rows of the new tokens, and what they read, [rows, values], before norm and gate."""
        spec, weights, ring_rows = self.spec, self.weights, self.ring_rows
        if spec.kind is Recurrence.NONE:
            return self._convolution_rows(projected)
        widths = [
            spec.channels,
            spec.value_width,
            *[spec.heads] * (2 if spec.kind is Recurrence.DELTA else 1),
        ]
        conv_input, _, *rest = torch.split(projected, widths, dim=1)
        convolved = silu(self._convolve(conv_input)).float()
        assert weights.decay is not None
        assert weights.time_bias is not None
        steps = softplus(rest[-1].float() + weights.time_bias)
        if spec.kind is Recurrence.SSM:
            steps = steps.clamp(*spec.time_limits)
        sums = self.segment.visible.float() @ (-weights.decay.exp() * steps)  # of log decays along each path
        decays = sums if not self.segment.num_ring_rows else sums + ring_rows.decays[-1]
        parts = torch.split(convolved, list(spec.sections), dim=1)
        if spec.kind is Recurrence.DELTA:
            q, k, v = _heads(spec, *parts)
            q, k = _unit(q) * spec.key_dim**-0.5, _unit(k)
            updates = self._delta_updates(k, v, rest[0].float().sigmoid(), decays)
        else:
            v, k, q = parts
            q, k, v = _heads(spec, q, k, v)
            updates = v * steps.unsqueeze(-1)
        new = RingArrays(conv_input, k, updates, decays)
        output = self._query(q, new, is_inclusive=True)
        if weights.skip is not None:
            output = output + weights.skip.unsqueeze(-1) * v
        return new, output.flatten(1)

    def _convolution_rows(self, projected: Tensor) -> tuple[RingArrays, Tensor]:
        """Return ring rows and outputs of LFM2's gated convolution, which has no state matrix."""
        input_gate, output_gate, x = projected.chunk(3, dim=1)
        conv_input = input_gate * x
        empty, count = self.ring_rows.keys.new_zeros, len(projected)
        updates, decays = empty((count, 1, self.spec.value_dim)), empty((count, 1))
        rows = RingArrays(conv_input, empty((count, 0, 0)), updates, decays)
        return rows, output_gate * self._convolve(conv_input)

    def _convolve(self, conv_input: Tensor) -> Tensor:
        """Return the convolution over each row's newest ancestors: [rows, channels]."""
        rows = torch.cat((self.state.inputs, self.ring_rows.inputs, conv_input))
        total = (rows[self.segment.window] * self.weights.conv.T).sum(dim=1)  # over [rows, kernel, channels]
        return total if self.weights.conv_bias is None else total + self.weights.conv_bias

    def _delta_updates(self, keys: Tensor, values: Tensor, strength: Tensor, decays: Tensor) -> Tensor:
        """Return each token's update: its value minus what its key reads from the state, times its strength.

        A token's update depends on those of its ancestors, so there is one triangular system per head.
        """
        no_rows = RingArrays(keys[:0], keys[:0], values[:0], decays)
        predicted = self._query(keys, no_rows, is_inclusive=False)
        right = strength.unsqueeze(-1) * (values - predicted)  # [rows, heads, values]
        scores = _scores(self.spec, keys, keys, decays, decays, self.segment.visible)
        system = scores.tril(-1) * strength.T.unsqueeze(-1)
        solved: Tensor = torch.linalg.solve_triangular(
            system, right.transpose(0, 1), upper=False, unitriangular=True
        )
        return solved.transpose(0, 1)

    def _query(self, queries: Tensor, new: RingArrays, *, is_inclusive: bool) -> Tensor:
        """Return what queries read from the state, the ring rows and, if inclusive, the new rows.

        The result is [rows, heads, values].
        """
        spec, ring_rows, visible = self.spec, self.ring_rows, self.segment.visible
        result = torch.einsum("thk,hkv->thv", _for_heads(queries, spec), self.state.matrix)
        result = result * new.decays.exp().unsqueeze(-1)
        all_visible = visible.new_ones((len(queries), self.segment.num_ring_rows))
        scores = _scores(spec, queries, ring_rows.keys, new.decays, ring_rows.decays, all_visible)
        result = result + torch.einsum("hti,ihv->thv", scores, ring_rows.updates)
        if is_inclusive:
            scores = _scores(spec, queries, new.keys, new.decays, new.decays, visible)
            result = result + torch.einsum("hti,ihv->thv", scores, new.updates)
        return result


def _scores(
    spec: RecurrentSpec,
    queries: Tensor,
    keys: Tensor,
    query_decays: Tensor,
    key_decays: Tensor,
    visible: Tensor,
) -> Tensor:
    """Return products of queries and keys, decayed from key to query, and 0 where invisible: [heads, rows, keys]."""
    products = torch.einsum("thk,ihk->hti", queries, keys).repeat_interleave(
        spec.heads // spec.key_heads, dim=0
    )
    spans = query_decays.T.unsqueeze(2) - key_decays.T.unsqueeze(1)
    return products * spans.masked_fill(~visible, -torch.inf).exp()


def _for_heads(keys: Tensor, spec: RecurrentSpec) -> Tensor:
    """Repeat keys or queries [rows, key heads, key size] for the value heads that share them."""
    return keys.repeat_interleave(spec.heads // spec.key_heads, dim=1)


def _heads(spec: RecurrentSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        q.reshape(len(q), spec.key_heads, spec.key_dim),
        k.reshape(len(k), spec.key_heads, spec.key_dim),
        v.reshape(len(v), spec.heads, spec.value_dim),
    )


def _unit(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt(rows.pow(2).sum(dim=-1, keepdim=True) + KEY_EPS)


def _norm_and_gate(
    spec: RecurrentSpec, norm: Tensor, output: Tensor, gate: Tensor, eps: float, exchange: Exchange
) -> Tensor:
    """Return `output` normed per head, then gated (delta rule); or gated, then normed by groups of heads (Mamba-2).

    `output` and `gate` are [rows, values].
    """
    activated_gate = silu(gate.float())
    if spec.kind is Recurrence.DELTA:
        by_head = output.view(-1, spec.heads, spec.value_dim)
        normed = rms_norm(by_head.to(gate.dtype), norm, eps).flatten(1)
        return (normed * activated_gate).to(gate.dtype)
    gated = (output * activated_gate).to(gate.dtype)
    if spec.shared_norm:
        return rms_norm(gated, norm, eps, exchange)
    by_group = norm.view(spec.norm_groups, -1)
    return rms_norm(gated.view(-1, *by_group.shape), by_group, eps).flatten(1)
