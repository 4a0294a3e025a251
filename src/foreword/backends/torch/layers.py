"""Layers of a decoder or an MTP module in plain torch."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, relu, silu

from foreword.backends.torch.adapters import LayerAdapters
from foreword.backends.torch.attention import PagedKv, add_shares, paged_attention
from foreword.backends.torch.experts import Activation, mixture
from foreword.backends.torch.latent import latent_attention
from foreword.backends.torch.norms import SINGLE_RANK, Exchange, rms_norm
from foreword.backends.torch.recurrent import LayerStates, recurrent_mixing
from foreword.backends.torch.weights import LayerWeights
from foreword.models.adapters import MODULES
from foreword.models.config import AttentionSpec, LayerSpec, MlpSpec
from foreword.models.layer_shapes import recurrent_inputs
from foreword.models.rope import CosSin, rotate


def _squared_relu(rows: Tensor) -> Tensor:
    return relu(rows).square()


ACTIVATIONS: dict[str, Activation] = {
    "silu": silu,
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
    "relu2": _squared_relu,
}


class TorchLayers:
    """Layers of a decoder or an MTP module, which are run by index."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        weights: Sequence[LayerWeights],
        eps: float,
        exchange: Exchange = SINGLE_RANK,
    ) -> None:
        """With an `exchange`, these are one rank's shares of the layers, whose outputs are summed over ranks."""
        self._specs = specs
        self._weights = weights
        self._eps = eps
        self._exchange = exchange

    def run(
        self,
        index: int,
        stream: Tensor,
        cos_sin: CosSin | None,
        kv: PagedKv | LayerStates,
        adapters: LayerAdapters,
    ) -> Tensor:
        """Return the residual stream after this layer; store the pass's keys and values, or ring rows and states."""
        layer, spec = self._weights[index], self._specs[index]
        if spec.mixes:
            if isinstance(kv, LayerStates):
                mixed = self._recurrent(layer, spec, stream, kv, adapters)
            else:
                mixed = self._attention(layer, spec.attention, stream, cos_sin, kv, adapters)
            stream = self._add_to_stream(stream, self._exchange.total(mixed), layer.after_attention, spec)
        if not spec.has_mlp:
            return stream
        output = self._exchange.total(self._mlp(layer, spec.mlp, stream, adapters))
        return self._add_to_stream(stream, output, layer.after_mlp, spec)

    def store_kv(self, index: int, stream: Tensor, cos_sin: CosSin | None, kv: PagedKv) -> None:
        """Store keys and values of rows, given the residual stream before this layer."""
        layer = self._weights[index]
        qkv = linear(self.norm(stream, layer.input_norm), layer.qkv, layer.qkv_bias)
        self._store_kv(layer, self._specs[index].attention, qkv, cos_sin, kv)

    def norm(self, rows: Tensor, weight: Tensor, exchange: Exchange = SINGLE_RANK) -> Tensor:
        """Return the rows, normalised unless `weight` is empty: then there is no norm."""
        return rms_norm(rows, weight, self._eps, exchange) if len(weight) else rows

    def _add_to_stream(self, stream: Tensor, output: Tensor, norm: Tensor | None, spec: LayerSpec) -> Tensor:
        """Return the residual stream plus a sublayer's output, after its norm and scale if the layer has these."""
        output = output if norm is None else self.norm(output, norm)
        return stream + (output if spec.residual_scale == 1 else output * spec.residual_scale)

    def _recurrent(
        self,
        layer: LayerWeights,
        spec: LayerSpec,
        stream: Tensor,
        states: LayerStates,
        adapters: LayerAdapters,
    ) -> Tensor:
        assert spec.recurrent is not None
        assert layer.recurrent is not None
        normed = self.norm(stream, layer.input_norm)
        projected = linear(normed, layer.qkv, layer.qkv_bias)
        widths = recurrent_inputs(spec.recurrent)
        adapters.add([(f"linear_attn.{name}", width) for name, width in widths.items()], normed, projected)
        mixed = recurrent_mixing(
            spec.recurrent, layer.recurrent, projected, self._eps, states, self._exchange
        )
        output = linear(mixed, layer.output, layer.output_bias)
        adapters.add([("linear_attn.out_proj", output.shape[1])], mixed, output)
        return output

    def _attention(
        self,
        layer: LayerWeights,
        spec: AttentionSpec,
        stream: Tensor,
        cos_sin: CosSin | None,
        kv: PagedKv,
        adapters: LayerAdapters,
    ) -> Tensor:
        normed = self.norm(stream, layer.input_norm)
        qkv = linear(normed, layer.qkv, layer.qkv_bias)
        widths = (spec.query_rows, spec.kv_width, spec.kv_width)
        adapters.add(tuple(zip(MODULES[:3], widths, strict=True)), normed, qkv)
        if spec.latent is None:
            attended = self._attend(layer, spec, qkv, cos_sin, kv)
        else:
            assert cos_sin is not None
            attended = latent_attention(spec, layer, qkv, cos_sin, kv)
        output = linear(attended, layer.output, layer.output_bias)
        adapters.add(((MODULES[3], output.shape[1]),), attended, output)
        return output

    def _attend(
        self, layer: LayerWeights, spec: AttentionSpec, qkv: Tensor, cos_sin: CosSin | None, kv: PagedKv
    ) -> Tensor:
        """Store this pass's keys and values; return attention over all visible rows, [rows, query width]."""
        q, gate = self._store_kv(layer, spec, qkv, cos_sin, kv)
        if kv.shares is not None:
            scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
            for view in kv.views:
                add_shares(kv.shares, q, kv.keys, view, scale, spec.softcap)
        attended = paged_attention(
            q, kv.keys, kv.values, kv.views, spec.scale, spec.softcap, layer.sinks
        ).flatten(1)
        return attended if gate is None else attended * gate.sigmoid()

    def _store_kv(
        self, layer: LayerWeights, spec: AttentionSpec, qkv: Tensor, cos_sin: CosSin | None, kv: PagedKv
    ) -> tuple[Tensor, Tensor | None]:
        """Store this pass's keys and values; return queries [rows, heads, dim], and any gates [rows, query width]."""
        q, k, v = torch.split(qkv, [spec.query_rows, spec.kv_width, spec.kv_width], dim=1)
        gate: Tensor | None = None
        if spec.gated:
            q, gate = (part.flatten(1) for part in q.view(len(qkv), spec.num_heads, -1).chunk(2, dim=-1))
        if spec.wide_qk_norm:
            q, k = self._norm_heads(layer, q, k, self._exchange)
        q, k, v = (part.reshape(len(qkv), -1, spec.head_dim) for part in (q, k, v))  # [rows, heads, dim]
        if not spec.wide_qk_norm:
            q, k = self._norm_heads(layer, q, k)
        if cos_sin is not None:
            q, k = rotate(q, *cos_sin), rotate(k, *cos_sin)
        kv.keys[kv.slots] = k
        kv.values[kv.slots] = v
        return q, gate

    def _norm_heads(
        self, layer: LayerWeights, q: Tensor, k: Tensor, exchange: Exchange = SINGLE_RANK
    ) -> tuple[Tensor, Tensor]:
        if layer.query_norm is None or layer.key_norm is None:
            return q, k
        return self.norm(q, layer.query_norm, exchange), self.norm(k, layer.key_norm, exchange)

    def _mlp(self, layer: LayerWeights, spec: MlpSpec, stream: Tensor, adapters: LayerAdapters) -> Tensor:
        normed, activation = self.norm(stream, layer.mlp_norm), ACTIVATIONS[spec.activation]
        gate_up = linear(normed, layer.gate_up, layer.gate_up_bias)
        width = gate_up.shape[1] // (2 if spec.gated else 1)
        adapters.add([(module, width) for module in MODULES[4 if spec.gated else 5 : 6]], normed, gate_up)
        active = activation(gate_up[:, :width])
        if spec.gated:
            active = active * gate_up[:, width:]
        output = linear(active, layer.down, layer.down_bias)
        adapters.add(((MODULES[6], output.shape[1]),), active, output)
        if spec.experts is None or layer.experts is None:
            return output
        if layer.experts.shared_gate is not None:
            output = output * linear(normed, layer.experts.shared_gate).sigmoid()
        return output + mixture(spec.experts, layer.experts, normed, activation)
