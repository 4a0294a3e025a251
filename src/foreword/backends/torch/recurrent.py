"""Recurrent layers in plain torch: the reference of all kernels.

A row is computed from the state before its chunk and from the rows of its ancestors in the chunk. So prompts,
decoded tokens, chains and trees have one formula; docs/design.md has it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from foreword.backends.torch.norms import rms_norm
from foreword.backends.torch.recurrent_rows import LayerState, RecurrentStore, RequestPass, RowParts, Segment
from foreword.backends.torch.weights import RecurrentWeights
from foreword.models.config import Recurrence, RecurrentSpec

KEY_EPS = 1e-6
"""Added to the sum of squares when keys and queries are normalised; not in configs."""


@dataclass(frozen=True)
class LayerStates:
    """States and rings of one layer during a pass."""

    store: RecurrentStore
    layer: int  # among the recurrent layers
    requests: list[RequestPass]


def recurrent_mixing(
    spec: RecurrentSpec, weights: RecurrentWeights, projected: Tensor, eps: float, states: LayerStates
) -> Tensor:
    """Return [rows, values] from all input projections, and store rows and states; 0 for padding rows."""
    mixed = projected.new_zeros((len(projected), spec.value_width))
    store, layer = states.store, states.layer
    for request in states.requests:
        state = store.state(layer, request.read_state)
        known = store.rows(layer, request.read_ring, request.segments[0].known)
        for place, segment in enumerate(request.segments):
            chunk = _Chunk(spec, weights, eps, state, known, segment)
            new, mixed[segment.rows] = chunk.rows(projected[segment.rows])
            if place == len(request.segments) - 1:
                store.write_rows(layer, request.write_ring, new)
                break
            state = folded(spec, state, known.joined(new))
            if (slot := request.folds[place]) is not None:
                store.write_state(layer, slot, state)
            known = new.first(0)
    return mixed


def folded(spec: RecurrentSpec, state: LayerState, rows: RowParts) -> LayerState:
    """Return the state after all rows of a chunk."""
    inputs = torch.cat((state.inputs, rows.inputs))[-(spec.kernel - 1) :]
    if spec.kind is Recurrence.NONE:
        return LayerState(state.matrix, inputs)
    left = (rows.decays[-1] - rows.decays).exp()  # [rows, heads]
    keys = _for_heads(rows.keys, spec)
    added = torch.einsum("thk,thv->hkv", keys * left.unsqueeze(-1), rows.updates)
    return LayerState(rows.decays[-1].exp()[:, None, None] * state.matrix + added, inputs)


@dataclass(frozen=True)
class _Chunk:
    """A chunk of one request during a pass: what its new rows read."""

    spec: RecurrentSpec
    weights: RecurrentWeights
    eps: float
    state: LayerState  # before the chunk
    known: RowParts  # committed rows
    segment: Segment  # new rows

    def rows(self, projected: Tensor) -> tuple[RowParts, Tensor]:
        """Return the ring rows of new tokens and their outputs, [rows, values]."""
        spec, weights, known = self.spec, self.weights, self.known
        if spec.kind is Recurrence.NONE:
            return self._convolution_rows(projected)
        widths = [
            spec.channels,
            spec.value_width,
            *[spec.heads] * (2 if spec.kind is Recurrence.DELTA else 1),
        ]
        entering, gate, *rest = torch.split(projected, widths, dim=1)
        convolved = silu(self._convolved(entering)).float()
        assert weights.decay is not None
        assert weights.time_bias is not None
        assert weights.norm is not None
        steps = softplus(rest[-1].float() + weights.time_bias)
        if spec.kind is Recurrence.SSM:
            steps = steps.clamp(*spec.time_limits)
        sums = self.segment.visible.float() @ (-weights.decay.exp() * steps)  # of log decays along each path
        decays = sums if not self.segment.known else sums + known.decays[-1]
        if spec.kind is Recurrence.DELTA:
            parts = torch.split(convolved, [spec.key_width, spec.key_width, spec.value_width], dim=1)
            q, k, v = _heads(spec, parts)
            q, k = _unit(q) * spec.key_dim**-0.5, _unit(k)
            updates = self._delta_updates(k, v, rest[0].float().sigmoid(), decays)
        else:
            v, k, q = torch.split(convolved, [spec.value_width, spec.key_width, spec.key_width], dim=1)
            q, k, v = _heads(spec, (q, k, v))
            updates = v * steps.unsqueeze(-1)
        new = RowParts(entering, k, updates, decays)
        read = self._read(q, new, is_inclusive=True)
        if weights.skip is not None:
            read = read + weights.skip.unsqueeze(-1) * v
        return new, _gated(spec, weights.norm, read, gate, self.eps)

    def _convolution_rows(self, projected: Tensor) -> tuple[RowParts, Tensor]:
        before, after, x = projected.chunk(3, dim=1)
        entering = before * x
        empty, count = self.known.keys.new_zeros, len(projected)
        updates, decays = empty((count, 1, self.spec.value_dim)), empty((count, 1))
        return RowParts(entering, empty((count, 0, 0)), updates, decays), after * self._convolved(entering)

    def _convolved(self, entering: Tensor) -> Tensor:
        """Return the convolution over each row's newest ancestors: [rows, channels]."""
        rows = torch.cat((self.state.inputs, self.known.inputs, entering))
        total = (rows[self.segment.window] * self.weights.conv.T).sum(dim=1)  # over [rows, kernel, channels]
        return total if self.weights.conv_bias is None else total + self.weights.conv_bias

    def _delta_updates(self, keys: Tensor, values: Tensor, strength: Tensor, decays: Tensor) -> Tensor:
        """Return what every token adds to the state: its value less what its key finds there, times its strength.

        A token's update depends on those of its ancestors: one triangular system per head.
        """
        nothing = RowParts(keys[:0], keys[:0], values[:0], decays)
        found = self._read(keys, nothing, is_inclusive=False)
        right = strength.unsqueeze(-1) * (values - found)  # [rows, heads, values]
        among = _scores(self.spec, keys, keys, decays, decays, self.segment.visible)
        system = among.tril(-1) * strength.T.unsqueeze(-1)
        solved: Tensor = torch.linalg.solve_triangular(
            system, right.transpose(0, 1), upper=False, unitriangular=True
        )
        return solved.transpose(0, 1)

    def _read(self, queries: Tensor, new: RowParts, *, is_inclusive: bool) -> Tensor:
        """Return what queries find in the state, the known rows and, if inclusive, the new ones.

        The result is [rows, heads, values].
        """
        spec, known, visible = self.spec, self.known, self.segment.visible
        found = torch.einsum("thk,hkv->thv", _for_heads(queries, spec), self.state.matrix)
        found = found * new.decays.exp().unsqueeze(-1)
        everywhere = visible.new_ones((len(queries), self.segment.known))
        scores = _scores(spec, queries, known.keys, new.decays, known.decays, everywhere)
        found = found + torch.einsum("hti,ihv->thv", scores, known.updates)
        if is_inclusive:
            scores = _scores(spec, queries, new.keys, new.decays, new.decays, visible)
            found = found + torch.einsum("hti,ihv->thv", scores, new.updates)
        return found


def _scores(
    spec: RecurrentSpec, queries: Tensor, keys: Tensor, after: Tensor, before: Tensor, visible: Tensor
) -> Tensor:
    """Return products of queries and keys, decayed from `before` to `after`; 0 if invisible: [heads, rows, keys]."""
    products = torch.einsum("thk,ihk->hti", queries, keys).repeat_interleave(
        spec.heads // spec.key_heads, dim=0
    )
    spans = after.T.unsqueeze(2) - before.T.unsqueeze(1)
    return products * spans.masked_fill(~visible, -torch.inf).exp()


def _for_heads(keys: Tensor, spec: RecurrentSpec) -> Tensor:
    """Repeat keys or queries [rows, key heads, key size] for the value heads that share them."""
    return keys.repeat_interleave(spec.heads // spec.key_heads, dim=1)


def _heads(spec: RecurrentSpec, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = parts
    return (
        q.reshape(len(q), spec.key_heads, spec.key_dim),
        k.reshape(len(k), spec.key_heads, spec.key_dim),
        v.reshape(len(v), spec.heads, spec.value_dim),
    )


def _unit(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt(rows.pow(2).sum(dim=-1, keepdim=True) + KEY_EPS)


def _gated(spec: RecurrentSpec, norm: Tensor, read: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Normalise per head, then gate (delta rule); or gate, then normalise all heads or groups of them (Mamba-2)."""
    opened = silu(gate.float())
    if spec.kind is Recurrence.DELTA:
        normed = rms_norm(read.to(gate.dtype), norm, eps).flatten(1)
        return (normed * opened).to(gate.dtype)
    grouped = (read.flatten(1) * opened).view(-1, spec.norm_groups, spec.value_width // spec.norm_groups)
    grouped = grouped.to(gate.dtype)
    return rms_norm(grouped, norm.view(spec.norm_groups, -1), eps).flatten(1)
