"""Random numbers as a function of what they are for: a counter-based integer hash.

A number is named by (seed, sample, stream, nonce, position, token). The first five make a 64-bit key per
row; the token is the counter behind it. The integers are the same on every device; `reference/noise.py`
holds the same functions for single Python numbers.
"""

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.acceptance.rules import Rule

GAMMA = 0x9E3779B97F4A7C15
MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB
HALF = 1 << 53
"""Uniforms are odd multiples of 2**-54, so neither 0 nor 1; below `HALF` of these units is below one half."""
UNIT = 2.0**-54

Keys = npt.NDArray[np.uint64]


class Stream(IntEnum):
    """What a number is for. Numbers of different streams are independent."""

    TARGET = 0  # coupled: the target's draw at a position, shared with the drafter
    DRAFT = 1  # token and block: the drafter's draw
    ACCEPT = 2  # token and block: the uniform that a node is accepted by
    RESIDUAL = 3  # token and block: the correction or bonus token


def signed64(value: int) -> int:
    """The int64 with the same bits as this unsigned number, as torch wants its constants."""
    return value - (1 << 64) if value >= 1 << 63 else value


def mix(z: Keys) -> Keys:
    """SplitMix64's finaliser: a bijection in which every input bit moves every output bit."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_A)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_B)
    return z ^ (z >> np.uint64(31))


def row_keys(seed: Any, sample: Any, stream: Any, nonce: Any, position: Any) -> Keys:
    """One key per row; the arguments are integers or integer arrays that broadcast to [rows]."""
    fields = np.broadcast_arrays(*(as_words(field) for field in (seed, sample, stream, nonce, position)))
    key = np.zeros(fields[0].shape, np.uint64)
    for words in fields:
        key = mix((key + np.uint64(GAMMA)) ^ words)
    return key


def as_words(values: Any) -> Keys:
    """Integers of any width as the 64 bits that the hash absorbs."""
    array = np.atleast_1d(np.asarray(values))
    return array.astype(np.uint64) if array.dtype != np.uint64 else array


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


def drafting_keys(rule: Rule, seed: Any, sample: Any, nonce: Any, positions: Any) -> Keys:
    """The keys a drafter draws with under a rule: a token is argmax(log q + gumbel(key, id)).

    Only *coupled* shares the target's noise. The other rules would be biased by it, as they would by
    using one position's noise twice: theirs is a stream of its own, and the nonce changes every step.
    """
    if rule is Rule.COUPLED:
        return row_keys(seed, sample, Stream.TARGET, 0, positions)
    return row_keys(seed, sample, Stream.DRAFT, nonce, positions)
