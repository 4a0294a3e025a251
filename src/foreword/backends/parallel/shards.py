"""Divides a model between ranks: attention heads, MLP widths, experts, and the vocabulary."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from foreword.errors import RequestError
from foreword.models.adapters import Factors, Lora
from foreword.models.config import LayerSpec, ModelConfig
from foreword.models.formats.checkpoint import (
    WHOLE,
    DerivedCheckpoint,
    ModelFile,
    QuantizedTensor,
    TensorPart,
    row_pieces,
)
from foreword.models.layer_shapes import expected_shapes

MOST_RANKS = 64

_BY_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")
"""Matrices divided by vocabulary. The last ranks' shares are padded to the same size."""

_ADDED_ONCE = (".o_proj.bias", ".down_proj.bias")
"""Biases of outputs that are summed over ranks; only the first rank adds them."""


@dataclass(frozen=True)
class Shard:
    """One rank's share of a model."""

    rank: int
    size: int  # number of ranks

    def config(self, whole: ModelConfig) -> ModelConfig:
        """Return the config of this rank's share."""
        shares = {layer: self._layer(layer) for layer in dict.fromkeys(whole.layers)}
        return replace(
            whole,
            layers=tuple(shares[layer] for layer in whole.layers),
            vocab_size=-(-whole.vocab_size // self.size),
        )

    def _layer(self, layer: LayerSpec) -> LayerSpec:
        attention, mlp = layer.attention, layer.mlp
        experts = mlp.experts and replace(mlp.experts, size=mlp.experts.size // self.size)
        return replace(
            layer,
            attention=replace(
                attention,
                num_heads=attention.num_heads // self.size,
                num_kv_heads=max(1, attention.num_kv_heads // self.size),
            ),
            mlp=replace(mlp, intermediate_size=mlp.intermediate_size // self.size, experts=experts),
        )

    def row_range(self, whole: int, share: int) -> tuple[int, int]:
        """Return this rank's range of `share` of `whole` rows or columns; ranks may share a KV head."""
        begin = self.rank * whole // self.size // share * share
        return begin, begin + share

    def token_range(self, whole: int) -> tuple[int, int]:
        """Return this rank's range of the vocabulary; the last ranks may have fewer."""
        share = -(-whole // self.size)
        return min(self.rank * share, whole), min((self.rank + 1) * share, whole)

    def part(self, whole: tuple[int, ...], share: tuple[int, ...]) -> TensorPart:
        """Return this rank's part of a tensor, given the shapes of the whole tensor and of the share."""
        if whole[0] != share[0]:
            return TensorPart(rows=self.row_range(whole[0], share[0]))
        if whole[-1] != share[-1]:
            return TensorPart(columns=self.row_range(whole[-1], share[-1]))
        return WHOLE


def check_size(config: ModelConfig, size: int) -> None:
    """Raise `RequestError` if the model cannot be divided between this many ranks."""
    if not 1 <= size <= MOST_RANKS:
        raise RequestError(f"tensor_parallel_size must be in 1 .. {MOST_RANKS}, not {size}")
    if obstacle := next(_indivisible_sizes(config, size), None):
        sizes_that_fit = [
            n for n in range(1, MOST_RANKS + 1) if next(_indivisible_sizes(config, n), None) is None
        ]
        raise RequestError(
            f"tensor_parallel_size {size} does not fit this {config.architecture} model: {obstacle}; "
            f"use {' or '.join(map(str, sizes_that_fit))}"
        )


def _indivisible_sizes(config: ModelConfig, size: int) -> Iterator[str]:
    """Yield reasons why the model cannot be divided between this many ranks."""
    for layer in dict.fromkeys(config.layers):
        attention, mlp = layer.attention, layer.mlp
        if layer.recurrent is not None and size > 1:
            yield "it has recurrent layers"
        widths = {f"{attention.num_heads} heads": attention.num_heads}
        widths[f"an MLP of width {mlp.intermediate_size}"] = mlp.intermediate_size
        if mlp.experts is not None:
            widths[f"experts of width {mlp.experts.size}"] = mlp.experts.size
        yield from (f"it has {part}" for part, width in widths.items() if width % size)
        kv_heads = attention.num_kv_heads
        if attention.latent is None and kv_heads % size and size % kv_heads:
            yield f"it has {kv_heads} KV heads"


class ShardCheckpoint(DerivedCheckpoint):
    """A rank's share of a checkpoint, in the form of a checkpoint of a narrower model.

    Only the share is read. Norms, routers and the compression of latent attention are on all ranks.
    """

    def __init__(self, whole: ModelFile, shard: Shard) -> None:
        super().__init__(whole)
        self.config = shard.config(whole.config)
        self._whole = whole
        self._shard = shard
        self._shapes = expected_shapes(whole.config)
        self._own_shapes = expected_shapes(self.config)

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        whole, share = self._shapes[name], self._own_shapes[name]
        if name.endswith(_ADDED_ONCE) and self._shard.rank:
            return torch.zeros(share, dtype=dtype)
        if name in _BY_TOKEN:
            begin, end = self._shard.token_range(whole[0])
            rows = self._whole.load_part(name, dtype, TensorPart(rows=(begin, end)))
            return pad(rows, (0, 0, 0, share[0] - (end - begin)))
        part = self._shard.part(whole, share)
        return self._whole.load(name, dtype) if part == WHOLE else self._whole.load_part(name, dtype, part)

    def pieces(self, name: str, dtype: torch.dtype, rows: int) -> Iterator[Tensor]:
        """Yield this rank's share of a matrix in pieces of rows. The whole share is read first."""
        yield from row_pieces(self.load(name, dtype), rows)

    def quantized(self, name: str) -> QuantizedTensor | None:
        return None


def adapter_share(adapter: Lora, config: ModelConfig, shard: Shard) -> Lora:
    """Return a rank's share of an adapter for a model with this config."""
    shapes, own_shapes = expected_shapes(config), expected_shapes(shard.config(config))
    factors = {}
    for (layer, module), factor in adapter.factors.items():
        name = f"model.layers.{layer}.{module}.weight"
        part = shard.part(shapes[name], own_shapes[name])
        up, down = TensorPart(rows=part.rows).of(factor.up), TensorPart(columns=part.columns).of(factor.down)
        factors[layer, module] = Factors(down.contiguous(), up.contiguous())
    return Lora(factors)
