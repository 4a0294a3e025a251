"""Divides a model between ranks: heads of attention and recurrences, MLP widths, experts, and the vocabulary."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from foreword.backends.weight_loader import stacked
from foreword.errors import RequestError
from foreword.models.adapters import Factors, Lora
from foreword.models.config import LayerSpec, ModelConfig, Recurrence, RecurrentSpec
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

_ADDED_ONCE = (".o_proj.bias", ".down_proj.bias", ".out_proj.bias")
"""Biases of products whose outputs are summed over ranks. Only the first rank adds such a bias."""


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
        experts, recurrent = mlp.experts, layer.recurrent
        if experts is not None:
            experts = replace(experts, size=experts.size // self.size)
        return replace(
            layer,
            attention=replace(
                attention,
                num_heads=attention.num_heads // self.size,
                num_kv_heads=max(1, attention.num_kv_heads // self.size),
            ),
            mlp=replace(mlp, intermediate_size=mlp.intermediate_size // self.size, experts=experts),
            recurrent=None if recurrent is None else self._recurrent(recurrent),
        )

    def _recurrent(self, spec: RecurrentSpec) -> RecurrentSpec:
        if spec.kind is Recurrence.NONE:
            return replace(spec, value_dim=spec.value_dim // self.size)
        return replace(
            spec,
            heads=spec.heads // self.size,
            key_heads=max(1, spec.key_heads // self.size),
            norm_groups=max(1, spec.norm_groups // self.size),
            shared_norm=spec.kind is Recurrence.SSM and spec.norm_groups < self.size,
        )

    def row_range(self, whole: int, share: int) -> tuple[int, int]:
        """Return this rank's range of `share` of `whole` rows or columns.

        With more ranks than KV heads, several ranks have the same range: the begin is rounded down to a multiple of
        `share`.
        """
        begin = self.rank * whole // self.size // share * share
        return begin, begin + share

    def token_range(self, whole: int) -> tuple[int, int]:
        """Return this rank's range of the vocabulary; the last ranks may have fewer."""
        share = -(-whole // self.size)
        return min(self.rank * share, whole), min((self.rank + 1) * share, whole)

    def parts(
        self, whole: tuple[int, ...], share: tuple[int, ...], sections: Sequence[tuple[int, int]]
    ) -> list[TensorPart]:
        """Return this rank's parts of a tensor, given the shapes of the whole tensor and of the share.

        `sections` are consecutive groups of rows, as (whole, share), each of which is divided between the ranks. Empty:
        all rows are one group.
        """
        if whole[0] != share[0]:
            parts, start = [], 0
            for whole_rows, rows in sections or [(whole[0], share[0])]:
                begin, end = self.row_range(whole_rows, rows)
                parts.append(TensorPart(rows=(start + begin, start + end)))
                start += whole_rows
            return parts
        if whole[-1] != share[-1]:
            return [TensorPart(columns=self.row_range(whole[-1], share[-1]))]
        return [WHOLE]


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
        if layer.recurrent is not None:
            yield from _indivisible_recurrence(layer.recurrent, size)
        widths = {f"{attention.num_heads} heads": attention.num_heads}
        widths[f"an MLP of width {mlp.intermediate_size}"] = mlp.intermediate_size
        if mlp.experts is not None:
            widths[f"experts of width {mlp.experts.size}"] = mlp.experts.size
        yield from (f"it has {part}" for part, width in widths.items() if width % size)
        kv_heads = attention.num_kv_heads
        if attention.latent is None and kv_heads % size and size % kv_heads:
            yield f"it has {kv_heads} KV heads"


def _indivisible_recurrence(spec: RecurrentSpec, size: int) -> Iterator[str]:
    if spec.kind is Recurrence.NONE:
        if spec.value_dim % size:
            yield f"it has convolutions of width {spec.value_dim}"
        return
    if spec.heads % size:
        yield f"it has {spec.heads} recurrent heads"
    if spec.key_heads % size and size % spec.key_heads:
        yield f"it has {spec.key_heads} key heads in recurrent layers"
    if spec.norm_groups > 1 and spec.norm_groups % size:
        yield f"it has {spec.norm_groups} norm groups in recurrent layers"


def row_sections(whole: ModelConfig, share: ModelConfig) -> dict[str, list[tuple[int, int]]]:
    """Return by name the rows, as (whole, share), of tensors whose rows are several projections, one after another."""
    sections_by_name = {}
    for index, (layer, share_layer) in enumerate(zip(whole.layers, share.layers, strict=True)):
        if layer.recurrent is not None and share_layer.recurrent is not None:
            sections = list(zip(layer.recurrent.sections, share_layer.recurrent.sections, strict=True))
            for name, times in (("conv1d", 1), ("in_proj_qkv", 1), ("in_proj", 3)):
                for suffix in ("weight", "bias"):
                    tensor_name = f"model.layers.{index}.linear_attn.{name}.{suffix}"
                    sections_by_name[tensor_name] = sections * times
    return sections_by_name


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
        self._share_shapes = expected_shapes(self.config)
        self._sections = row_sections(whole.config, self.config)

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        whole, share = self._shapes[name], self._share_shapes[name]
        if name.endswith(_ADDED_ONCE) and self._shard.rank:
            return torch.zeros(share, dtype=dtype)
        if name in _BY_TOKEN:
            begin, end = self._shard.token_range(whole[0])
            rows = self._whole.load_part(name, dtype, TensorPart(rows=(begin, end)))
            return pad(rows, (0, 0, 0, share[0] - (end - begin)))
        parts = self._shard.parts(whole, share, self._sections.get(name, ()))
        if parts == [WHOLE]:
            return self._whole.load(name, dtype)
        return stacked([self._whole.load_part(name, dtype, part) for part in parts])

    def pieces(self, name: str, dtype: torch.dtype, rows: int) -> Iterator[Tensor]:
        """Yield this rank's share of a matrix in pieces of rows. The whole share is read first."""
        yield from row_pieces(self.load(name, dtype), rows)

    def quantized(self, name: str) -> QuantizedTensor | None:
        return None


def adapter_share(adapter: Lora, config: ModelConfig, shard: Shard) -> Lora:
    """Return a rank's share of an adapter for a model with this config."""
    share_config = shard.config(config)
    shapes, share_shapes = expected_shapes(config), expected_shapes(share_config)
    sections = row_sections(config, share_config)
    factors = {}
    for (layer, module), factor in adapter.factors.items():
        name = f"model.layers.{layer}.{module}.weight"
        parts = shard.parts(shapes[name], share_shapes[name], sections.get(name, ()))
        up = stacked([TensorPart(rows=part.rows).of(factor.up) for part in parts])
        down = TensorPart(columns=parts[0].columns).of(factor.down)
        factors[layer, module] = Factors(down.contiguous(), up.contiguous())
    return Lora(factors)
