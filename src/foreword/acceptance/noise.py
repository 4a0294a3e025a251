"""Counter-based random numbers: an integer hash of what each number is used for.

A number is identified by (seed, sample, stream, nonce, position, token). The first five form a 64-bit key per row;
the token is the counter. The integers are equal on every device.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15
MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB
HALF = 1 << 53
"""Uniforms are odd multiples of 2**-54, so never 0 or 1; `HALF` is one half in these units."""
UNIT = 2.0**-54

Keys = npt.NDArray[np.uint64]
Numbers = int | npt.NDArray[np.integer]


class Stream(IntEnum):
    """Purpose of a random number. Streams are independent."""

    TARGET = 0  # coupled: the target's draw at a position, shared with the drafter
    DRAFT = 1  # other rules: the drafter's draw
    ACCEPT = 2  # other rules: the uniform that accepts a node
    RESIDUAL = 3  # other rules: the correction or bonus token


def signed64(value: int) -> int:
    """Return the int64 with the same bits as an unsigned number, for torch."""
    return value - (1 << 64) if value >= 1 << 63 else value


def mix(z: Keys) -> Keys:
    """Apply SplitMix64's finaliser, a bijection with full avalanche."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_A)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_B)
    return z ^ (z >> np.uint64(31))


def stems(seed: Numbers, sample: Numbers, stream: Stream, nonce: Numbers) -> Keys:
    """Return the key prefixes [requests] that all positions of a stream share."""
    key = np.zeros(1, np.uint64)
    for numbers in (seed, sample, int(stream), nonce):
        key = extend_keys(key, numbers)
    return key


def extend_keys(keys: Keys, numbers: Numbers) -> Keys:
    """Mix one more integer into each key. A stem extended by a position is the key of a row."""
    return mix((keys + np.uint64(GAMMA)) ^ np.asarray(numbers).astype(np.uint64))


def branch_keys(keys: Keys, branches: Numbers) -> Keys:
    """Return the keys of tree nodes at the same position. Branch 0 has the position's key, as in a chain."""
    numbers = np.asarray(branches)
    return np.where(numbers > 0, extend_keys(keys, numbers), keys)


def bits(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return 64 random bits per (key, token), both int64 of one shape."""
    z = keys + (tokens + 1) * signed64(GAMMA)
    z = (z ^ shift_right(z, 30)) * signed64(MIX_A)
    z = (z ^ shift_right(z, 27)) * signed64(MIX_B)
    return z ^ shift_right(z, 31)


def shift_right(z: Tensor, count: int) -> Tensor:
    """Shift right logically, filling with zeros; torch shifts signed integers arithmetically."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return standard Gumbel noise, float64: -log(-log(u)), using 1 - u in the upper tail for full precision."""
    units = shift_right(bits(keys, tokens), 10) | 1
    lower = units < HALF
    tail = torch.where(lower, units, 2 * HALF - units).double() * UNIT
    exponential = -torch.where(lower, tail.log(), torch.log1p(-tail))
    return -exponential.log()


def uniforms(keys: Keys) -> npt.NDArray[np.float64]:
    """Return one uniform per key in the open interval (0, 1): never 0, so that an impossible node is not accepted."""
    units = (mix(keys + np.uint64(GAMMA)) >> np.uint64(10)) | np.uint64(1)
    result: npt.NDArray[np.float64] = np.minimum(units.astype(np.float64) * UNIT, 1 - 2.0**-53)
    return result


def key_tensor(keys: Keys, device: torch.device | str = "cpu") -> Tensor:
    return torch.from_numpy(keys.view(np.int64)).to(device)
