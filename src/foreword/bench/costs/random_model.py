"""Random models of any shape, in memory: what a pass costs does not depend on what the weights say."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from foreword.errors import RequestError
from foreword.models.config import ExpertsSpec, LayerSpec, MlpSpec, ModelConfig
from foreword.models.formats.checkpoint import QuantizedTensor, stretches
from foreword.models.layer_shapes import expected_shapes
from foreword.models.tokenization.tokenizer import Tokenizer

EXPERTS_USED = 2


class RandomCheckpoint:
    """Weights that keep the residual stream at a sane size, drawn when they are asked for; it has no tokenizer."""

    def __init__(self, config: ModelConfig, blocks: Mapping[str, QuantizedTensor] | None = None) -> None:
        self.config = config
        self.path = Path("random numbers")
        self._shapes = expected_shapes(config)
        self._seeds = {name: seed for seed, name in enumerate(sorted(self._shapes))}
        self._blocks = blocks or {}

    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        """The same numbers every time."""
        shape = self._shapes[name]
        values = torch.randn(shape, generator=torch.Generator().manual_seed(self._seeds[name]))
        return (1 + 0.1 * values if len(shape) == 1 else values * shape[1] ** -0.5).to(dtype)

    def pieces(self, name: str, dtype: torch.dtype, rows: int) -> Iterator[Tensor]:
        yield from stretches(self.load(name, dtype), rows)

    def quantized(self, name: str) -> QuantizedTensor | None:
        return self._blocks.get(name)

    def release(self) -> None:
        pass

    def sampling_defaults(self) -> dict[str, float]:
        return {}

    def tokenizer(self) -> Tokenizer:
        raise NotImplementedError


def as_mixture(config: ModelConfig, experts: int) -> ModelConfig:
    """A dense model's shape with experts instead of its MLPs; those that a token takes are as wide together."""
    if not EXPERTS_USED < experts <= 1024:
        raise RequestError(f"a mixture has {EXPERTS_USED + 1} .. 1024 experts, not {experts}")
    return replace(config, layers=tuple(_with_experts(layer, experts) for layer in config.layers))


def _with_experts(layer: LayerSpec, count: int) -> LayerSpec:
    if layer.mlp.experts is not None:
        raise RequestError("the model has experts already; give a dense one")
    size = layer.mlp.intermediate_size // EXPERTS_USED
    experts = ExpertsSpec(count, EXPERTS_USED, size, normalize=True)
    return replace(layer, mlp=MlpSpec(0, activation=layer.mlp.activation, experts=experts))
