"""The tensors of the torch decoder."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foreword.backends.support import require_supported
from foreword.backends.weight_loader import WeightLoader
from foreword.models.config import LayerSpec, ModelConfig
from foreword.models.formats.checkpoint import Checkpoint
from foreword.progress import Progress


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Projections that read the same input are stored as one matrix."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [query_width + 2 * kv_width, hidden]
    qkv_bias: Tensor | None
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None  # [head_dim]
    output: Tensor  # [hidden, query_width]
    output_bias: Tensor | None
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None


@dataclass(frozen=True)
class DecoderWeights:
    """All tensors of a decoder."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]; the embedding itself when tied


def load_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    ends: DecoderWeights | None = None,
) -> DecoderWeights:
    """Read a whole decoder; `ends` lends its embedding, head and last norm."""
    config = checkpoint.config
    layer = require_supported(config, "torch")
    loader = WeightLoader(checkpoint, dtype, device, progress)
    weights = _load_ends(loader, config) if ends is None else ends
    layers = tuple(_load_layer(loader, layer, f"model.layers.{i}.") for i in range(config.num_layers))
    return replace(weights, layers=layers)


def _load_ends(loader: WeightLoader, config: ModelConfig) -> DecoderWeights:
    embedding = loader.tensor("model.embed_tokens.weight")
    head = embedding if config.tied_embeddings else loader.tensor("lm_head.weight")
    return DecoderWeights(embedding, (), loader.tensor("model.norm.weight"), head)


def _load_layer(loader: WeightLoader, layer: LayerSpec, prefix: str) -> LayerWeights:
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output, gate_up, down = ("self_attn.o_proj",), ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)

    def bias(names: tuple[str, ...], wanted: bool) -> Tensor | None:
        return loader.stacked(prefix, names, "bias") if wanted else None

    def head_norm(name: str) -> Tensor | None:
        return loader.tensor(f"{prefix}self_attn.{name}.weight") if layer.attention.qk_norm else None

    return LayerWeights(
        input_norm=loader.tensor(prefix + "input_layernorm.weight"),
        qkv=loader.stacked(prefix, qkv, "weight"),
        qkv_bias=bias(qkv, layer.attention.bias),
        query_norm=head_norm("q_norm"),
        key_norm=head_norm("k_norm"),
        output=loader.stacked(prefix, output, "weight"),
        output_bias=bias(output, layer.attention.output_bias),
        mlp_norm=loader.tensor(prefix + "post_attention_layernorm.weight"),
        gate_up=loader.stacked(prefix, gate_up, "weight"),
        gate_up_bias=bias(gate_up, layer.mlp.bias),
        down=loader.stacked(prefix, down, "weight"),
        down_bias=bias(down, layer.mlp.bias),
    )
