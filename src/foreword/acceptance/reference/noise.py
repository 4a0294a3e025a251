"""The noise of `acceptance/noise.py` for single Python numbers."""

import math

WORD = (1 << 64) - 1


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def row_key(seed: int, sample: int, stream: int, nonce: int, position: int, branch: int = 0) -> int:
    """The key of one row; `branch` tells rows at one position apart, the first has none."""
    key = 0
    for word in (seed, sample, stream, nonce, position, *([branch] if branch else [])):
        key = mix(((key + 0x9E3779B97F4A7C15) & WORD) ^ word)
    return key


def bits(key: int, token: int) -> int:
    return mix((key + (token + 1) * 0x9E3779B97F4A7C15) & WORD)


def gumbel(key: int, token: int) -> float:
    units = (bits(key, token) >> 10) | 1
    if units < 1 << 53:
        return -math.log(-math.log(units * 2.0**-54))
    return -math.log(-math.log1p(-((1 << 54) - units) * 2.0**-54))


def uniform(key: int) -> float:
    """A uniform in the open interval (0, 1)."""
    return min(((bits(key, 0) >> 10) | 1) * 2.0**-54, 1 - 2.0**-53)
