"""Random numbers as a function of what they are for: a counter-based integer hash.

A number is named by (seed, sample, stream, nonce, position, token). The first five make a 64-bit key per
row; the token is the counter after it. The integers are the same on every device; `reference/noise.py`
holds the same functions for single Python numbers.
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
"""Uniforms are odd multiples of 2**-54, so neither 0 nor 1; below `HALF` of these units is below one half."""
UNIT = 2.0**-54

Keys = npt.NDArray[np.uint64]
Numbers = int | npt.NDArray[np.integer]


class Stream(IntEnum):
    """What a number is for. Numbers of different streams are independent."""

    TARGET = 0  # coupled: the target's draw at a position, shared with the drafter
    DRAFT = 1  # all other rules: the drafter's draw
    ACCEPT = 2  # all other rules: the uniform that a node is accepted by
    RESIDUAL = 3  # all other rules: the correction or bonus token


def signed64(value: int) -> int:
    """The int64 with the same bits as this unsigned number, as torch wants its constants."""
    return value - (1 << 64) if value >= 1 << 63 else value


def mix(z: Keys) -> Keys:
    """SplitMix64's finaliser: a bijection in which every input bit moves every output bit."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_A)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_B)
    return z ^ (z >> np.uint64(31))


def stems(seed: Numbers, sample: Numbers, stream: Stream, nonce: Numbers) -> Keys:
    """[requests], what the keys of all positions of one stream start from."""
    key = np.zeros(1, np.uint64)
    for words in (seed, sample, int(stream), nonce):
        key = absorbed(key, words)
    return key


def absorbed(keys: Keys, words: Numbers) -> Keys:
    """Keys that also depend on these integers; given positions, the stems become keys of rows."""
    return mix((keys + np.uint64(GAMMA)) ^ np.asarray(words).astype(np.uint64))


def branched(keys: Keys, branches: Numbers) -> Keys:
    """Keys of nodes that share a position: branch 0 keeps the position's own, so that a chain has no others."""
    numbers = np.asarray(branches)
    return np.where(numbers > 0, absorbed(keys, numbers), keys)


def bits(keys: Tensor, tokens: Tensor) -> Tensor:
    """64 random bits for each (key, token), both int64 and of one shape."""
    z = keys + (tokens + 1) * signed64(GAMMA)
    z = (z ^ shift_right(z, 30)) * signed64(MIX_A)
    z = (z ^ shift_right(z, 27)) * signed64(MIX_B)
    return z ^ shift_right(z, 31)


def shift_right(z: Tensor, count: int) -> Tensor:
    """Shift in zeros from the left, which torch's shift of signed integers does not."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise, float64: -log(-log(u)), the upper tail from 1 - u so that it keeps all its bits."""
    units = shift_right(bits(keys, tokens), 10) | 1
    lower = units < HALF
    tail = torch.where(lower, units, 2 * HALF - units).double() * UNIT
    exponential = -torch.where(lower, tail.log(), torch.log1p(-tail))
    return -exponential.log()


def uniforms(keys: Keys) -> npt.NDArray[np.float64]:
    """One uniform per key in the open interval (0, 1): never 0, so that an impossible node is never accepted."""
    units = (mix(keys + np.uint64(GAMMA)) >> np.uint64(10)) | np.uint64(1)
    result: npt.NDArray[np.float64] = np.minimum(units.astype(np.float64) * UNIT, 1 - 2.0**-53)
    return result


def key_tensor(keys: Keys, device: torch.device | str = "cpu") -> Tensor:
    """Keys as the int64 tensor that the token-level functions take."""
    return torch.from_numpy(keys.view(np.int64)).to(device)
