"""Rotary position embedding in the rotate-half layout."""

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
    """Return the scaled frequency of each rotated pair, float32 [rotated dimensions / 2], in radians per position."""
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
    """Divide the frequencies of long wavelengths, keep those of short ones, and interpolate in between."""
    wavelength = 2 * math.pi / plain
    rotations = scaling.original_context / wavelength  # within the original context
    blend = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / scaling.factor + blend * plain


def _yarn(plain: Tensor, theta: float, scaling: YarnRopeScaling) -> Tensor:
    """Divide low frequencies, keep high ones, and interpolate in between, linearly in the index of the pair.

    The bounds are the pairs that rotate `beta_fast` and `beta_slow` times within the original context.
    """
    dim = 2 * len(plain)

    def pair_index(rotations: float) -> float:
        return dim * math.log(scaling.original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_index(scaling.beta_fast), pair_index(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's factor of the rotated dimensions, which keeps attention sharp over longer texts."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_magnitude(factor: float, original_context: int) -> float:
    """Return LongRoPE's factor of the rotated dimensions."""
    return math.sqrt(1 + math.log(factor) / math.log(original_context)) if factor > 1 else 1.0


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + dim / 2) of heads [rows, heads, head size] by cos, sin [rows, dim / 2]; keep the rest."""
    dim = 2 * cos.shape[-1]
    first, second = heads[..., :dim].chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(rotated if dim == heads.shape[-1] else (*rotated, heads[..., dim:]), dim=-1)


CosSin = tuple[Tensor, Tensor]  # (cos, sin) of the rotation angles, both [rows, rotated dimensions / 2]


class Rotations:
    """The rotary embeddings of a decoder's layers; layers with the same settings share one table."""

    def __init__(self, layers: Sequence[LayerSpec], rope: RopeSpec, device: torch.device) -> None:
        self._settings = [_settings(layer.attention, rope) for layer in layers]
        self._frequencies = {
            settings: frequencies(*settings).to(device)
            for settings in dict.fromkeys(self._settings)
            if settings is not None
        }

    def of(self, positions: Tensor, dtype: torch.dtype) -> list[CosSin | None]:
        """Return the cosines and sines for these positions [rows] in every layer; None: no rotary embedding."""
        tables: dict[tuple[RopeSpec, int] | None, CosSin | None] = {None: None}
        for settings, pair_frequencies in self._frequencies.items():
            angles, magnitude = positions.unsqueeze(1).float() * pair_frequencies, settings[0].magnitude
            cos, sin = angles.cos(), angles.sin()
            if magnitude != 1:
                cos, sin = cos * magnitude, sin * magnitude
            tables[settings] = cos.to(dtype), sin.to(dtype)
        return [tables[settings] for settings in self._settings]


def _settings(attention: AttentionSpec, rope: RopeSpec) -> tuple[RopeSpec, int] | None:
    """Return the arguments of `frequencies` for a layer; None: it has no rotary embedding."""
    if not attention.is_rotated:
        return None
    return attention.rope or rope, attention.rotary_dim
