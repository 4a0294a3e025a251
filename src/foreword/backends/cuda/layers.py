"""Attention or recurrence and MLP of a layer on Triton kernels. A layer's properties are data (`LayerSpec`)."""

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
    Place,
    RowAdapters,
)
from foreword.backends.cuda.experts import Mixture
from foreword.backends.cuda.kernels.attention import ScoreRule, Sight
from foreword.backends.cuda.kernels.gates import gate_heads
from foreword.backends.cuda.kernels.rotation import rotate_and_keep
from foreword.backends.cuda.kernels.rows import activate, join_parts, norm_heads, weigh
from foreword.backends.cuda.latent import LatentAttention
from foreword.backends.cuda.packed_products import Matrix, Rows
from foreword.backends.cuda.products import Product, Products
from foreword.backends.cuda.recurrent import RecurrentPass, mixed
from foreword.backends.cuda.upload import UploadedPass, attended
from foreword.backends.torch.weights import LayerWeights
from foreword.models.config import AttentionSpec, LayerSpec, Recurrence
from foreword.models.rope import CosSin


@dataclass(frozen=True)
class LayerPass:
    """Inputs of a pass's layers other than the residual stream."""

    uploaded: UploadedPass
    sight: Sight
    turns: Sequence[CosSin]  # cosines and sines of every layer, float32
    keys: Tensor  # [layers, physical rows, kv heads, dim], or packed
    values: Tensor
    spare_slot: int  # KV row that padding writes to
    added: RowAdapters | None
    places: Sequence[int]  # of every layer, among those of its kind
    recurrent: RecurrentPass | None


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
        self.mixtures = {
            index: Mixture(spec.mlp, layer.experts)
            for index, (spec, layer) in enumerate(zip(specs, weights, strict=True))
            if layer.experts is not None
        }

        self._latent = {
            index: LatentAttention(spec.attention, layer, products)
            for index, (spec, layer) in enumerate(zip(specs, weights, strict=True))
            if layer.latent is not None
        }

    @property
    def all_products(self) -> list[Product]:
        """Return the products of all layers."""
        found = [
            product
            for layer in self._weights
            for product in (
                Product(layer.qkv, layer.qkv_bias),
                Product(layer.gate_up, layer.gate_up_bias),
                Product(layer.output, layer.output_bias, is_split=True),
                Product(layer.down, layer.down_bias, is_split=True),
            )
        ]
        return [product for product in found if all(product.weight.shape)]

    def mixing(self, index: int, normed: Rows, given: LayerPass) -> Tensor:
        """Return the addend of attention or recurrence to the stream; store what later rows read.

        In parts, it lacks the output's bias.
        """
        layer, spec = self._weights[index], self._specs[index].attention
        if (recurrence := self._specs[index].recurrent) is not None:
            assert layer.recurrent is not None
            assert given.recurrent is not None
            modules = CONVOLUTION_INPUT if recurrence.kind is Recurrence.NONE else RECURRENT_INPUT
            projected = self._product(normed, layer.qkv, layer.qkv_bias, given.added, (index, modules))
            seen = mixed(
                recurrence, layer.recurrent, projected, self._eps, given.recurrent, given.places[index]
            )
            place = index, RECURRENT_OUTPUT
            return self._addend(Rows(seen), layer.output, layer.output_bias, given.added, place)
        qkv = self._product(normed, layer.qkv, layer.qkv_bias, given.added, (index, QKV))
        seen = self._attended(layer, spec, qkv, index, given)
        if given.added is None and self._products.splits(layer.output):
            return self._products.parts(seen, layer.output)
        return self._addend(Rows(seen), layer.output, layer.output_bias, given.added, (index, OUTPUT))

    def _attended(
        self, layer: LayerWeights[Matrix], spec: AttentionSpec, qkv: Tensor, index: int, given: LayerPass
    ) -> Tensor:
        own, rows = given.places[index], len(qkv)
        keys, values = given.keys[own], given.values[own]
        if latent := self._latent.get(index):
            return latent.seen(qkv, given.turns[index], keys, values, given.sight, given.uploaded)
        norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = layer.query_norm, layer.key_norm
        if norms is not None and spec.wide_qk_norm:
            norm_heads(qkv, norms, self._eps)
            norms = None
        queries = qkv.new_empty((rows, spec.num_heads, spec.head_dim))
        slots = given.uploaded.batch.slots
        rotate_and_keep(qkv, given.turns[index], slots, norms, self._eps, keys, values, queries)
        rule = ScoreRule(spec.scale, spec.softcap, spec.window, layer.sinks)
        found = attended(queries, keys, values, given.sight, given.uploaded.tiles, rule)
        if spec.gated:
            gate_heads(found, qkv, found)
        return found.view(rows, spec.query_width)

    def mlp(self, index: int, normed: Rows, given: LayerPass) -> Tensor:
        """Return the MLP's addend to the stream, possibly in parts."""
        mixture = self.mixtures.get(index)
        if mixture is None:
            return self._dense(index, normed, given)
        gate, has_shared = mixture.shared_gate, self._specs[index].mlp.intermediate_size > 0
        shape = (mixture.per_token + has_shared, *normed.numbers.shape)
        parts = torch.empty(shape, dtype=torch.float32, device=normed.numbers.device)
        mixture.forward(
            normed.numbers, given.uploaded.batch.slots, given.spare_slot, parts[: mixture.per_token]
        )
        if has_shared:
            weigh(self._dense(index, normed, given), normed.numbers, gate, parts[-1])
        return parts

    def _dense(self, index: int, normed: Rows, given: LayerPass) -> Tensor:
        """Run the dense MLP of a layer, or the shared expert of a mixture."""
        layer, spec = self._weights[index], self._specs[index].mlp
        gate_up = self._product(normed, layer.gate_up, layer.gate_up_bias, given.added, (index, GATE_UP))
        active = Rows.room(gate_up, gate_up.shape[1] // 2, layer.down)
        activate(gate_up, *active, spec.activation)
        return self._addend(active, layer.down, layer.down_bias, given.added, (index, DOWN))

    def _product(
        self, x: Rows, weight: Matrix, bias: Tensor | None, added: RowAdapters | None, place: Place
    ) -> Tensor:
        """Return a product plus the rows' adapters."""
        y = self._products(x, weight, bias)
        return y if added is None else added.add(place, x.numbers, y)

    def _addend(
        self, x: Rows, weight: Matrix, bias: Tensor | None, added: RowAdapters | None, place: Place
    ) -> Tensor:
        """Return a product for the stream, in parts unless a bias or adapter must be added first."""
        if not self._products.splits(weight):
            return self._product(x, weight, bias, added, place)
        parts = self._products.parts(x, weight)
        if bias is None and added is None:
            return parts
        y = join_parts(parts, bias, x.numbers.new_empty((len(x.numbers), len(weight))))
        return y if added is None else added.add(place, x.numbers, y)
