"""Layers on Triton kernels: attention or recurrence, and MLP. A layer's properties are data (`LayerSpec`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.backends.cuda.adapters import (
    CONVOLUTION_INPUT,
    DOWN,
    GATE_UP,
    OUTPUT,
    QKV,
    RECURRENT_INPUT,
    RECURRENT_OUTPUT,
    AdaptedModules,
    RowAdapters,
)
from foreword.backends.cuda.experts import Mixture
from foreword.backends.cuda.kernels.attention import AttentionMetadata, ScoreRule
from foreword.backends.cuda.kernels.dependent_launch import PDL_ROWS
from foreword.backends.cuda.kernels.gates import gate_heads
from foreword.backends.cuda.kernels.rotation import rotate_and_store
from foreword.backends.cuda.kernels.rows import activate, gate_shared_expert, join_parts, norm_heads
from foreword.backends.cuda.latent import LatentAttention
from foreword.backends.cuda.packed_products import Matrix, Rows
from foreword.backends.cuda.products import Product, Products
from foreword.backends.cuda.recurrent import RecurrentPass, by_tap, mix_positions
from foreword.backends.cuda.side_stream import SideStream
from foreword.backends.cuda.upload import UploadedPass, tiled_attention
from foreword.backends.torch.weights import LayerWeights
from foreword.models.config import AttentionSpec, LayerSpec, Recurrence
from foreword.models.rope import CosSin


@dataclass(frozen=True)
class LayerPass:
    """Inputs of a pass's layers other than the residual stream."""

    uploaded: UploadedPass
    metadata: AttentionMetadata
    cos_sin: Sequence[CosSin]  # cosines and sines of every layer, float32
    keys: Tensor  # [layers, physical rows, kv heads, dim], or packed
    values: Tensor
    spare_slot: int  # KV row that padding writes to
    adapters: RowAdapters | None  # None: no row has an adapter
    # For every layer, its index among the layers with attention, or among the recurrent ones
    kind_indices: Sequence[int]
    recurrent: RecurrentPass | None  # None: there are no recurrent layers


class CudaLayers:
    """All layers of a decoder."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        weights: Sequence[LayerWeights[Matrix]],
        eps: float,
        products: Products,
    ) -> None:
        self._specs = specs
        self._weights = weights
        self._eps = eps
        self._products = products
        self._side_stream = SideStream(weights[0].input_norm.device)
        self.mixtures = {
            index: Mixture(spec.mlp, layer.experts)
            for index, (spec, layer) in enumerate(zip(specs, weights, strict=True))
            if layer.experts is not None
        }
        self._recurrent = {
            index: by_tap(layer.recurrent)
            for index, layer in enumerate(weights)
            if layer.recurrent is not None
        }
        self._latent = {
            index: LatentAttention(spec.attention, layer, products)
            for index, (spec, layer) in enumerate(zip(specs, weights, strict=True))
            if layer.latent is not None
        }

    @property
    def all_products(self) -> list[Product]:
        """Return the kinds of matrix products in all layers, to be checked at the start."""
        products = [
            product
            for layer in self._weights
            for product in (
                Product(layer.qkv, layer.qkv_bias),
                Product(layer.gate_up, layer.gate_up_bias),
                Product(layer.output, layer.output_bias, is_split=True),
                Product(layer.down, layer.down_bias, is_split=True),
            )
        ]
        return [product for product in products if all(product.weight.shape)]

    def mixing(self, index: int, normed: Rows, inputs: LayerPass) -> Tensor:
        """Return what attention or recurrence adds to the residual stream; store KV rows, or states and ring rows.

        If the result is in parts, float32 [parts, rows, hidden], the output's bias is not added yet.
        """
        layer, spec = self._weights[index], self._specs[index].attention
        if (recurrence := self._specs[index].recurrent) is not None:
            assert inputs.recurrent is not None
            modules = CONVOLUTION_INPUT if recurrence.kind is Recurrence.NONE else RECURRENT_INPUT
            projected = self._product(normed, layer.qkv, layer.qkv_bias, inputs.adapters, (index, modules))
            recurrent_index = inputs.kind_indices[index]
            mixed = mix_positions(
                recurrence, self._recurrent[index], projected, self._eps, inputs.recurrent, recurrent_index
            )
            output = (index, RECURRENT_OUTPUT)
            return self._addend(Rows(mixed), layer.output, layer.output_bias, inputs.adapters, output)
        qkv = self._product(normed, layer.qkv, layer.qkv_bias, inputs.adapters, (index, QKV))
        attended = self._attend(layer, spec, qkv, index, inputs)
        if inputs.adapters is None and self._products.splits(layer.output):
            return self._products.parts(attended, layer.output)
        return self._addend(Rows(attended), layer.output, layer.output_bias, inputs.adapters, (index, OUTPUT))

    def _attend(
        self, layer: LayerWeights[Matrix], spec: AttentionSpec, qkv: Tensor, index: int, inputs: LayerPass
    ) -> Tensor:
        kv_index, rows = inputs.kind_indices[index], len(qkv)
        keys, values = inputs.keys[kv_index], inputs.values[kv_index]
        if latent := self._latent.get(index):
            return latent.attend(qkv, inputs.cos_sin[index], keys, values, inputs.metadata, inputs.uploaded)
        norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = layer.query_norm, layer.key_norm
        if norms is not None and spec.wide_qk_norm:
            norm_heads(qkv, norms, self._eps)
            norms = None
        queries = qkv.new_empty((rows, spec.num_heads, spec.head_dim))
        slots = inputs.uploaded.batch.slots
        rotate_and_store(qkv, inputs.cos_sin[index], slots, norms, self._eps, keys, values, queries)
        rule = ScoreRule(spec.scale, spec.softcap, spec.window, layer.sinks)
        attended = tiled_attention(queries, keys, values, inputs.metadata, inputs.uploaded.tiles, rule)
        if spec.gated:
            gate_heads(attended, qkv, attended)
        return attended.view(rows, spec.query_width)

    def mlp(self, index: int, normed: Rows, inputs: LayerPass) -> Tensor:
        """Return what the MLP adds to the residual stream, possibly in parts, float32 [parts, rows, hidden]."""
        mixture = self.mixtures.get(index)
        if mixture is None:
            return self._dense(index, normed, inputs)
        gate, has_shared = mixture.shared_gate, self._specs[index].mlp.intermediate_size > 0
        shape = (mixture.per_token + has_shared, *normed.numbers.shape)
        parts = torch.empty(shape, dtype=torch.float32, device=normed.numbers.device)
        with self._side_stream.fork(is_parallel=has_shared and len(parts[0]) <= PDL_ROWS):
            if has_shared:
                gate_shared_expert(self._dense(index, normed, inputs), normed.numbers, gate, parts[-1])
        mixture.forward(
            normed.numbers, inputs.uploaded.batch.slots, inputs.spare_slot, parts[: mixture.per_token]
        )
        self._side_stream.join()
        return parts

    def _dense(self, index: int, normed: Rows, inputs: LayerPass) -> Tensor:
        """Run the dense MLP of a layer, or the shared expert of a mixture."""
        layer, spec = self._weights[index], self._specs[index].mlp
        gate_up = self._product(normed, layer.gate_up, layer.gate_up_bias, inputs.adapters, (index, GATE_UP))
        active = Rows.allocate(gate_up, spec.intermediate_size, layer.down)
        activate(gate_up, *active, spec.activation)
        return self._addend(active, layer.down, layer.down_bias, inputs.adapters, (index, DOWN))

    def _product(
        self,
        x: Rows,
        weight: Matrix,
        bias: Tensor | None,
        adapters: RowAdapters | None,
        adapted: AdaptedModules,
    ) -> Tensor:
        """Return a product plus the output of the rows' adapters for these modules."""
        y = self._products(x, weight, bias)
        return y if adapters is None else adapters.add(adapted, x.numbers, y)

    def _addend(
        self,
        x: Rows,
        weight: Matrix,
        bias: Tensor | None,
        adapters: RowAdapters | None,
        adapted: AdaptedModules,
    ) -> Tensor:
        """Return a product that is added to the stream, in parts unless a bias or adapters must be added first."""
        if not self._products.splits(weight):
            return self._product(x, weight, bias, adapters, adapted)
        parts = self._products.parts(x, weight)
        if bias is None and adapters is None:
            return parts
        y = join_parts(parts, bias, x.numbers.new_empty((len(x.numbers), len(weight))))
        return y if adapters is None else adapters.add(adapted, x.numbers, y)
