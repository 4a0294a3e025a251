"""Gumbel noise from a counter-based integer hash: the same integers on every device, in any order."""

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _wrapped(value: int) -> int:
    """An unsigned 64-bit integer as the int64 with the same bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _mixed(x: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64 with wrap-around; every input bit reaches every output bit."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        x = (x ^ _shifted(x, shift)) * _wrapped(multiplier)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def hash_bits(keys: tuple[Tensor, ...]) -> Tensor:
    """64 random bits for every combination of broadcast int64 keys, absorbed one after the other."""
    state = torch.zeros((), dtype=torch.int64, device=keys[0].device)
    for key in keys:
        state = _mixed((state ^ key) + _wrapped(_GOLDEN))
    return state


def gumbel(keys: tuple[Tensor, ...]) -> Tensor:
    """Standard Gumbel noise in float64 from 53 bits, strictly inside (0, 1) before the logarithms."""
    uniform = (_shifted(hash_bits(keys), 11).double() + 0.5) * 2.0**-53
    # Near 1 the exponential variate is tiny and log loses it; log1p of the exact complement does not.
    exponential = torch.where(uniform < 0.5, -torch.log(uniform), -torch.log1p(uniform - 1.0))
    return -torch.log(exponential)
