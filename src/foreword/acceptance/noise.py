"""Counter-based random numbers: each is an integer hash of its purpose.

A random number is identified by (seed, sample, stream, nonce, position, token). `sample` is the index of the answer,
`nonce` the number of committed steps. The first five are hashed to a 64-bit key per row; the token is the counter. The
integers are equal on every device.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Constants of SplitMix64.
GAMMA = 0x9E3779B97F4A7C15
MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB

UNIT = 2.0**-54
"""Uniforms are odd multiples of this, so they are never 0 or 1."""

HALF = 1 << 53
"""One half, in multiples of `UNIT`."""

Keys = npt.NDArray[np.uint64]
Numbers = int | npt.NDArray[np.integer]


class Stream(IntEnum):
    """Purpose of a random number. Streams are independent."""

    TARGET = 0  # *coupled*: samples the target's token at a position, and the drafter's
    DRAFT = 1  # other rules: samples the drafter's token
    ACCEPT = 2  # other rules: the uniform that decides whether a node is accepted
    RESIDUAL = 3  # other rules: samples the correction or bonus token


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
    """Return 64 random bits for each (key, token), int64; `keys` and `tokens` are int64 and broadcast."""
    z = keys + (tokens + 1) * signed64(GAMMA)
    z = (z ^ shift_right(z, 30)) * signed64(MIX_A)
    z = (z ^ shift_right(z, 27)) * signed64(MIX_B)
    return z ^ shift_right(z, 31)


def shift_right(z: Tensor, count: int) -> Tensor:
    """Shift right logically, filling with zeros; torch shifts signed integers arithmetically."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return standard Gumbel noise for each (key, token), float64: -log(-log(u)) for a uniform u.

    For u above one half it computes log(u) from 1 - u, which keeps full precision.
    """
    units = shift_right(bits(keys, tokens), 10) | 1
    lower = units < HALF
    tail = torch.where(lower, units, 2 * HALF - units).double() * UNIT
    exponential = -torch.where(lower, tail.log(), torch.log1p(-tail))
    return -exponential.log()


def uniforms(keys: Keys) -> npt.NDArray[np.float64]:
    """Return one uniform per key in the open interval (0, 1).

    It is never 0, so that a node with acceptance probability 0 is never accepted.
    """
    units = (mix(keys + np.uint64(GAMMA)) >> np.uint64(10)) | np.uint64(1)
    result: npt.NDArray[np.float64] = np.minimum(units.astype(np.float64) * UNIT, 1 - 2.0**-53)
    return result


def key_tensor(keys: Keys, device: torch.device | str = "cpu") -> Tensor:
    """Return the keys as a tensor: the same bits as int64."""
    return torch.from_numpy(keys.view(np.int64)).to(device)
