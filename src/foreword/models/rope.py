"""Rotary position embedding, rotate-half layout."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from foreword.models.config import (
    AttentionSpec,
    FrequencyFactors,
    LayerSpec,
    LinearRopeScaling,
    Llama3RopeScaling,
    RopeSpec,
    YarnRopeScaling,
)


def frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    plain = 1.0 / (rope.theta**exponent)  # float32 [dim / 2]
    match rope.scaling:
        case None:
            return plain
        case LinearRopeScaling(factor):
            return plain / factor
        case FrequencyFactors(factors):
            return plain / torch.tensor(factors, dtype=torch.float32)
        case Llama3RopeScaling() as scaling:
            return _llama3(plain, scaling)
        case YarnRopeScaling() as scaling:
            return _yarn(plain, rope.theta, scaling)


def _llama3(plain: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Scale long wavelengths, keep short ones, and blend in between."""
    wavelength = 2 * math.pi / plain
    turns = scaling.original_context / wavelength  # rotations within the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / scaling.factor + blend * plain


def _yarn(plain: Tensor, theta: float, scaling: YarnRopeScaling) -> Tensor:
    """Blend by pair index: a linear ramp between the pairs that rotate `beta` times."""
    dim = 2 * len(plain)

    def pair(turns: float) -> float:
        return dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's factor of rotated dimensions, which keeps attention sharp over longer texts."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_magnitude(factor: float, original_context: int) -> float:
    """Return LongRoPE's factor of rotated dimensions."""
    return math.sqrt(1 + math.log(factor) / math.log(original_context)) if factor > 1 else 1.0


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + dim / 2) of heads [rows, heads, numbers] by cos and sin [rows, dim / 2].

    Numbers after the first `dim` are unchanged.
    """
    dim = 2 * cos.shape[-1]
    first, second = heads[..., :dim].chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(rotated if dim == heads.shape[-1] else (*rotated, heads[..., dim:]), dim=-1)


CosSin = tuple[Tensor, Tensor]


class Rotations:
    """Rotary frequencies of a decoder's layers."""

    def __init__(self, layers: Sequence[LayerSpec], rope: RopeSpec, device: torch.device) -> None:
        self._kinds = [_kind(layer.attention, rope) for layer in layers]
        self._frequencies = {
            kind: frequencies(*kind).to(device) for kind in dict.fromkeys(self._kinds) if kind is not None
        }

    def of(self, positions: Tensor, dtype: torch.dtype) -> list[CosSin | None]:
        """Return [rows, rotated numbers / 2] for every layer; None: no rotary embedding."""
        tables: dict[tuple[RopeSpec, int] | None, CosSin | None] = {None: None}
        for kind, own in self._frequencies.items():
            angles, magnitude = positions.unsqueeze(1).float() * own, kind[0].magnitude
            cos, sin = angles.cos(), angles.sin()
            if magnitude != 1:
                cos, sin = cos * magnitude, sin * magnitude
            tables[kind] = cos.to(dtype), sin.to(dtype)
        return [tables[kind] for kind in self._kinds]


def _kind(attention: AttentionSpec, rope: RopeSpec) -> tuple[RopeSpec, int] | None:
    if not attention.is_rotated:
        return None
    return attention.rope or rope, attention.rotary_dim
