"""Rotary position embedding, rotate-half layout."""

import math

import torch
from torch import Tensor

from foreword.models.config import (
    FrequencyFactors,
    LinearRopeScaling,
    Llama3RopeScaling,
    ModelConfig,
    RopeSpec,
)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of every rotated pair of a decoder's heads."""
    return frequencies(config.rope, config.layer.attention.head_dim)


def frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of every rotated pair."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponent)  # float32 [head_dim / 2]
    match rope.scaling:
        case None:
            return plain
        case LinearRopeScaling(factor):
            return plain / factor
        case FrequencyFactors(factors):
            return plain / torch.tensor(factors, dtype=torch.float32)
        case Llama3RopeScaling() as scaling:
            return _llama3(plain, scaling)


def _llama3(plain: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Stretch long wavelengths, keep short ones, blend between the two bounds."""
    wavelength = 2 * math.pi / plain
    turns = scaling.original_context / wavelength  # full turns within the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / scaling.factor + blend * plain


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + dim / 2) of heads [rows, heads, dim] by cos and sin [rows, dim / 2]."""
    first, second = heads.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
