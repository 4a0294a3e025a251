"""A checkpoint of random numbers in memory: any shape, no files, no tokenizer."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from foreword.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, NormSpec
from foreword.models.formats.checkpoint import QuantizedTensor
from foreword.models.layer_shapes import expected_shapes
from foreword.models.rope_spec import RopeSpec
from foreword.models.tokenization.tokenizer import Tokenizer

SMOLLM2_SHAPE = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    context_length=8192,
    layers=(LayerSpec(AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64), MlpSpec(1536)),) * 30,
    norm=NormSpec(1e-5),
    rope=RopeSpec(100000.0),
    tied_embeddings=True,
)


class RandomCheckpoint:
    """Weights that keep the residual stream at a sane size, drawn when they are asked for."""

    def __init__(self, config: ModelConfig, blocks: Mapping[str, QuantizedTensor] | None = None) -> None:
        self.config = config
        self.path = Path("random numbers")
        self._shapes = expected_shapes(config)
        self._blocks = blocks or {}

    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        shape = self._shapes[name]
        generator = torch.Generator().manual_seed(sorted(self._shapes).index(name))
        values = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            return (1 + 0.1 * values).to(dtype)
        return (values * shape[1] ** -0.5).to(dtype)

    def quantized(self, name: str) -> QuantizedTensor | None:
        return self._blocks.get(name)

    def release(self) -> None:
        pass

    def sampling_defaults(self) -> dict[str, float]:
        return {}

    def tokenizer(self) -> Tokenizer:
        raise NotImplementedError
