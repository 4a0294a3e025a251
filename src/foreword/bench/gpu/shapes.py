"""Models of a named shape with random weights, made on the device: nothing is downloaded."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from foreword.backends.torch.weights import DecoderWeights, LayerWeights
from foreword.errors import RequestError
from foreword.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, NormSpec, RopeSpec
from foreword.models.formats.checkpoint import open_checkpoint


def _llama(
    vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, dim: int, tied: bool
) -> ModelConfig:
    layer = LayerSpec(AttentionSpec(heads, kv_heads, dim), MlpSpec(mlp))
    return ModelConfig(
        architecture="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        context_length=131_072,
        layers=(layer,) * layers,
        norm=NormSpec(1e-5),
        rope=RopeSpec(500_000.0),
        tied_embeddings=tied,
    )


SHAPES = {
    "llama-8b": _llama(128_256, 4096, 14_336, 32, 32, 8, 128, tied=False),
    "llama-1b": _llama(128_256, 2048, 8192, 16, 32, 8, 64, tied=True),
    "smollm2-135m": _llama(49_152, 576, 1536, 30, 9, 3, 64, tied=True),
}


def named_shape(name: str) -> ModelConfig:
    """A shape by name, or that of a checkpoint."""
    if name in SHAPES:
        return SHAPES[name]
    if Path(name).exists():
        return open_checkpoint(Path(name)).config
    raise RequestError(f"no shape {name!r}; use {', '.join(SHAPES)} or the path of a model")


def draft_shape(target: ModelConfig) -> ModelConfig:
    """A small model that could draft for the target."""
    return replace(SHAPES["llama-1b"], vocab_size=target.vocab_size)


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    """Numbers of the size that trained weights have, the same every time."""
    generator = torch.Generator(device).manual_seed(0)
    spec, width = config.layer.attention, config.hidden_size

    def matrix(rows: int, columns: int) -> Tensor:
        numbers = torch.empty((rows, columns), dtype=dtype, device=device)
        return numbers.normal_(0.0, columns**-0.5, generator=generator)

    def ones() -> Tensor:
        return torch.ones(width, dtype=dtype, device=device)

    def layer() -> LayerWeights:
        mlp = config.layer.mlp.intermediate_size
        return LayerWeights(
            input_norm=ones(),
            qkv=matrix(spec.query_width + 2 * spec.kv_width, width),
            qkv_bias=None,
            query_norm=None,
            key_norm=None,
            output=matrix(width, spec.query_width),
            output_bias=None,
            mlp_norm=ones(),
            gate_up=matrix(2 * mlp, width),
            gate_up_bias=None,
            down=matrix(width, mlp),
            down_bias=None,
        )

    embedding = matrix(config.vocab_size, width)
    head = embedding if config.tied_embeddings else matrix(config.vocab_size, width)
    return DecoderWeights(embedding, tuple(layer() for _ in config.layers), ones(), head)
