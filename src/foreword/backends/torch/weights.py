"""The weights of a decoder as torch tensors or in a backend's own matrix format, and how they are loaded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

import torch
from torch import Tensor

from foreword.backends.support import require_supported
from foreword.backends.weight_loader import (
    ExpertSource,
    LayerSource,
    M_co,
    MixingNames,
    WeightLoader,
    mixing_names,
    stacked,
)
from foreword.models.config import (
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelConfig,
    Recurrence,
    RecurrentSpec,
)
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.layer_shapes import FINAL_NORM, norm_names
from foreword.progress import Progress


@dataclass(frozen=True)
class LatentWeights:
    """Additional weights of latent attention. The layer's `qkv` computes the (compressed) query and the stored row."""

    query: Tensor | None  # [query_width, query_rank]
    keys: Tensor  # [heads, nope_dim, kv_rank], from stored rows to keys
    values: Tensor  # [heads, value_dim, kv_rank]


@dataclass(frozen=True)
class RecurrentWeights:
    """Additional weights of a recurrent layer. The layer's `qkv` are all input projections, see `recurrent_inputs`."""

    conv: Tensor  # [channels, kernel]
    conv_bias: Tensor | None
    norm: Tensor | None = None  # [value size], or [values]: the norm of all heads
    decay: Tensor | None = None  # float32 [heads], logarithm of the decay rate
    time_bias: Tensor | None = None  # float32 [heads]
    skip: Tensor | None = None  # float32 [heads], Mamba-2's D


@dataclass(frozen=True)
class ExpertWeights(Generic[M_co]):
    """Weights of a mixture of experts, without the shared MLP."""

    router: Tensor  # float32 [experts, hidden]
    correction: Tensor | None  # float32 [experts], added to scores when selecting
    gate_up: M_co  # [experts, 2 * size, hidden]
    down: M_co  # [experts, hidden, size]
    shared_gate: Tensor | None  # [1, hidden], gate of the shared MLP
    router_bias: Tensor | None = None  # float32 [experts]
    gate_up_bias: Tensor | None = None  # [experts, 2 * size]
    down_bias: Tensor | None = None  # [experts, hidden]


@dataclass(frozen=True, kw_only=True)
class LayerWeights(Generic[M_co]):
    """Weights of one layer. Projections of the same input are one matrix."""

    input_norm: Tensor  # [hidden]; empty: no norm
    qkv: M_co | Tensor  # [query_width + 2 * kv_width, hidden]; empty in an MLP alone
    qkv_bias: Tensor | None = None
    query_norm: Tensor | None = None  # [head_dim], or the width of all heads
    key_norm: Tensor | None = None
    output: M_co | Tensor  # [hidden, query_width]
    output_bias: Tensor | None = None
    mlp_norm: Tensor  # [hidden]; empty: no norm
    gate_up: M_co | Tensor  # [2 * intermediate, hidden]; in a mixture, the shared experts' (may be empty)
    gate_up_bias: Tensor | None = None
    down: M_co | Tensor  # [hidden, intermediate]
    down_bias: Tensor | None = None
    after_attention: Tensor | None = None  # [hidden], norm of the attention's output
    after_mlp: Tensor | None = None  # [hidden], norm of the MLP's output
    latent: LatentWeights | None = None
    experts: ExpertWeights[Any] | None = None
    sinks: Tensor | None = None  # float32 [heads]
    recurrent: RecurrentWeights | None = None

    @property
    def plain(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that a llama-style layer may have: the first fields, up to `down_bias`."""
        return tuple(vars(self).values())[:12]

    @property
    def nbytes(self) -> int:
        parts = [self, *(part for part in (self.latent, self.experts, self.recurrent) if part is not None)]
        return sum(getattr(tensor, "nbytes", 0) for part in parts for tensor in vars(part).values())


@dataclass(frozen=True)
class DecoderWeights(Generic[M_co]):
    """All tensors of a decoder."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights[M_co], ...]
    final_norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]; the embedding if tied

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def layer_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def nbytes(self) -> int:
        head = 0 if self.head is self.embedding else self.head.nbytes
        return self.layer_bytes + self.embedding.nbytes + head + self.final_norm.nbytes

    def with_layers(self, layers: Sequence[int]) -> "DecoderWeights[M_co]":
        """Return the weights with only these layers."""
        return replace(self, layers=tuple(self.layers[layer] for layer in layers))

    def beside(self, checkpoint: Checkpoint) -> "DecoderWeights[M_co | Tensor]":
        """Return the layers of `checkpoint` with this embedding, head and final norm."""
        return load_weights(checkpoint, self.dtype, self.device, outer=self)

    def followed_by(self, checkpoint: Checkpoint) -> "DecoderWeights[M_co | Tensor]":
        final_norm = checkpoint.load(FINAL_NORM, self.dtype).to(self.device)
        layers = (*self.layers, *self.beside(checkpoint).layers)
        return DecoderWeights(self.embedding, layers, final_norm, self.head)


def load_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    outer: DecoderWeights[object] | None = None,
) -> DecoderWeights:
    """Load a decoder's weights; embedding, head and final norm come from `outer` if given."""
    config = checkpoint.config
    require_supported(config)
    loader = WeightLoader(checkpoint, dtype, device, progress)
    return weights_from(loader, config, outer)


def weights_from(
    loader: LayerSource[M_co], config: ModelConfig, outer: DecoderWeights[object] | None = None
) -> DecoderWeights[M_co]:
    """Load a decoder's weights from any source of tensors; as `load_weights`."""
    weights = load_outer_matrices(loader, config) if outer is None else outer
    layers = tuple(load_layer(loader, layer, f"model.layers.{i}.") for i, layer in enumerate(config.layers))
    return DecoderWeights(weights.embedding, layers, weights.final_norm, weights.head)


def load_outer_matrices(loader: LayerSource[object], config: ModelConfig) -> DecoderWeights:
    """Load embedding, head and final norm, without layers."""
    embedding = loader.tensor("model.embed_tokens.weight")
    head = embedding if config.tied_embeddings else loader.tensor("lm_head.weight")
    return DecoderWeights(embedding, (), loader.tensor(FINAL_NORM), head)


def load_layer(loader: LayerSource[M_co], layer: LayerSpec, prefix: str) -> LayerWeights[M_co]:
    """Load one layer, whose tensors' names begin with `prefix`."""
    attention, norms = layer.attention, norm_names(layer)
    mixing = mixing_names(layer)
    shared = "mlp." if layer.mlp.experts is None else "mlp.shared_experts."
    gate_up: tuple[str, ...] = (f"{shared}gate_proj", f"{shared}up_proj")
    down = (f"{shared}down_proj",)
    has_mlp = layer.mlp.intermediate_size > 0
    if not layer.mlp.gated:
        gate_up = gate_up[1:]

    def optional(name: str | None) -> Tensor | None:
        return None if name is None else loader.tensor(f"{prefix}{name}.weight")

    def norm(name: str | None) -> Tensor:
        return loader.nothing(0) if name is None else loader.tensor(f"{prefix}{name}.weight")

    def matrix(names: tuple[str, ...]) -> M_co:
        return loader.matrix([f"{prefix}{name}.weight" for name in names])

    def bias(names: tuple[str, ...], has_bias: bool) -> Tensor | None:
        return _stacked(loader, prefix, names, "bias") if has_bias else None

    hidden = loader.hidden_size
    return LayerWeights(
        input_norm=norm(norms.before_attention),
        qkv=matrix(mixing.inputs) if layer.mixes else loader.nothing(0, hidden),
        qkv_bias=_input_bias(loader, layer, mixing, prefix) if layer.mixes and mixing.has_bias else None,
        query_norm=optional(mixing.query_norm if layer.mixes else None),
        key_norm=optional(mixing.key_norm if layer.mixes else None),
        output=matrix(mixing.output) if layer.mixes else loader.nothing(hidden, 0),
        output_bias=bias(mixing.output, layer.mixes and mixing.has_output_bias),
        mlp_norm=norm(norms.before_mlp),
        gate_up=matrix(gate_up) if has_mlp else loader.nothing(0, hidden),
        gate_up_bias=bias(gate_up, layer.mlp.bias and has_mlp),
        down=matrix(down) if has_mlp else loader.nothing(hidden, 0),
        down_bias=bias(down, layer.mlp.bias and has_mlp),
        after_attention=optional(norms.after_attention),
        after_mlp=optional(norms.after_mlp),
        latent=None if attention.latent is None else _load_latent(loader, attention, prefix),
        recurrent=None if layer.recurrent is None else _load_recurrent(loader, layer.recurrent, prefix),
        experts=None if layer.mlp.experts is None else _load_experts(loader, layer.mlp, has_mlp, prefix),
        sinks=loader.floats(f"{prefix}self_attn.sinks") if attention.sinks else None,
    )


def _stacked(loader: LayerSource[object], prefix: str, names: tuple[str, ...], suffix: str) -> Tensor:
    return stacked([loader.tensor(f"{prefix}{name}.{suffix}") for name in names])


def _input_bias(loader: LayerSource[object], layer: LayerSpec, names: MixingNames, prefix: str) -> Tensor:
    latent = layer.attention.latent
    if layer.recurrent is not None or latent is None or latent.query_rank is not None:
        return _stacked(loader, prefix, names.inputs, "bias")
    row_bias = loader.tensor(f"{prefix}{names.inputs[1]}.bias")  # an uncompressed query has none
    return torch.cat((row_bias.new_zeros(layer.attention.query_width), row_bias))


def _load_latent(loader: LayerSource[object], attention: AttentionSpec, prefix: str) -> LatentWeights:
    latent = attention.latent
    assert latent is not None
    query = None if latent.query_rank is None else loader.tensor(f"{prefix}self_attn.q_b_proj.weight")
    stored = loader.tensor(f"{prefix}self_attn.kv_b_proj.weight")
    expanding = stored.view(attention.num_heads, -1, latent.kv_rank)
    keys, values = torch.split(expanding, [latent.nope_dim, latent.value_dim], dim=1)
    return LatentWeights(query, keys.contiguous(), values.contiguous())


def _load_recurrent(loader: LayerSource[object], spec: RecurrentSpec, prefix: str) -> RecurrentWeights:
    module = f"{prefix}linear_attn."
    has_state = spec.kind is not Recurrence.NONE
    return RecurrentWeights(
        conv=loader.tensor(f"{module}conv1d.weight").squeeze(1),
        conv_bias=loader.tensor(f"{module}conv1d.bias") if spec.conv_bias else None,
        norm=loader.tensor(f"{module}norm.weight") if has_state else None,
        decay=loader.floats(f"{module}A_log") if has_state else None,
        time_bias=loader.floats(f"{module}dt_bias") if has_state else None,
        skip=loader.floats(f"{module}D") if spec.kind is Recurrence.SSM else None,
    )


def _load_experts(
    loader: LayerSource[object], mlp: MlpSpec, has_shared: bool, prefix: str
) -> ExpertWeights[Any]:
    spec = mlp.experts
    assert spec is not None
    inner = ("gate_proj", "up_proj") if mlp.gated else ("up_proj",)

    def stacked_experts(*names: str, suffix: str = "weight") -> Tensor:
        result: Tensor | None = None
        for index in range(spec.count):
            part = _stacked(loader, f"{prefix}mlp.experts.{index}.", names, suffix)
            if result is None:  # allocated now, because the loader has checked the shape
                result = part.new_empty((spec.count, *part.shape))
            result[index] = part
        assert result is not None
        return result

    def matrices(*names: str) -> object:
        packed = None
        if isinstance(loader, ExpertSource):
            expert_prefixes = [f"{prefix}mlp.experts.{index}." for index in range(spec.count)]
            packed = loader.experts(
                [[f"{expert}{name}.weight" for name in names] for expert in expert_prefixes]
            )
        return stacked_experts(*names) if packed is None else packed

    gated = spec.shared_gate and has_shared
    return ExpertWeights(
        router=loader.floats(f"{prefix}mlp.gate.weight"),
        correction=loader.floats(f"{prefix}mlp.gate.e_score_correction_bias") if spec.corrected else None,
        gate_up=matrices(*inner),
        down=matrices("down_proj"),
        shared_gate=loader.tensor(f"{prefix}mlp.shared_expert_gate.weight") if gated else None,
        router_bias=loader.floats(f"{prefix}mlp.gate.bias") if spec.bias else None,
        gate_up_bias=stacked_experts(*inner, suffix="bias") if spec.bias else None,
        down_bias=stacked_experts("down_proj", suffix="bias") if spec.bias else None,
    )
