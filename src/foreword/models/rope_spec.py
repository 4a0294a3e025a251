"""How heads are turned by position."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency-dependent stretching of rotary embeddings, as Llama 3.1 and later use it."""

    factor: float  # low frequencies turn this many times slower
    low_freq_factor: float  # wavelengths longer than original_context / this are stretched in full
    high_freq_factor: float  # wavelengths shorter than original_context / this are left alone
    original_context: int  # context length of the pre-training


@dataclass(frozen=True)
class LinearRopeScaling:
    """Positions divided by a constant factor."""

    factor: float  # every frequency turns this many times slower


@dataclass(frozen=True)
class YarnRopeScaling:
    """YaRN: frequencies that turn seldom within the original context are stretched, those that turn often are not."""

    factor: float  # stretched frequencies turn this many times slower
    original_context: int  # context length of the pre-training
    beta_fast: float = 32.0  # a frequency with more turns than this is left alone
    beta_slow: float = 1.0  # one with fewer is stretched in full
    truncate: bool = True  # the bounds between them are whole numbers of pairs


@dataclass(frozen=True)
class FrequencyFactors:
    """A divisor per rotary frequency: LongRoPE's, and how GGUF files store llama3 scaling."""

    factors: tuple[float, ...]  # one per frequency (rotated numbers / 2), fastest first


RopeScaling = Llama3RopeScaling | LinearRopeScaling | YarnRopeScaling | FrequencyFactors


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of heads, rotate-half layout."""

    theta: float  # base of the frequencies
    scaling: RopeScaling | None = None  # None: plain
    magnitude: float = 1.0  # turned numbers are multiplied with it (YaRN, LongRoPE)
    rotary_dim: int | None = None  # only this many numbers at the start of a head turn; None: all
