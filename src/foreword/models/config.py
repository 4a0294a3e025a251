"""What a decoder looks like, whatever file it came from: its layers, made of declared parts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


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
class FrequencyFactors:
    """A divisor per rotary frequency, as GGUF files store llama3 scaling."""

    factors: tuple[float, ...]  # one per frequency (head_dim / 2), fastest first


RopeScaling = Llama3RopeScaling | LinearRopeScaling | FrequencyFactors


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of whole heads, rotate-half layout."""

    theta: float  # base of the frequencies
    scaling: RopeScaling | None = None  # None: plain


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention of one layer."""

    num_heads: int  # query heads
    num_kv_heads: int  # key/value heads; divides num_heads
    head_dim: int  # width of one head; need not be hidden_size / num_heads
    bias: bool = False  # q, k, v projections add a bias (Qwen2)
    output_bias: bool = False  # the output projection adds one too (Llama with attention_bias)
    qk_norm: bool = False  # norm on every query and key head before rotation (Qwen3)
    window: int | None = None  # only this many of the newest positions are seen; None: all

    @property
    def query_width(self) -> int:
        """Columns of the query projection's output."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the key (or value) projection's output."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class MlpSpec:
    """The gated MLP of one layer: down(activation(gate(x)) * up(x))."""

    intermediate_size: int  # width inside
    bias: bool = False  # the three projections add one
    activation: str = "silu"
    num_experts: int = 0  # 0: one MLP for all tokens; otherwise each token takes some of this many


@dataclass(frozen=True)
class NormSpec:
    """Normalisation before attention, before the MLP and at the end."""

    eps: float  # added to the mean square before the root
    kind: str = "rms"


@dataclass(frozen=True)
class LayerSpec:
    """One layer: attention, then the MLP, each added to the residual stream."""

    attention: AttentionSpec
    mlp: MlpSpec


@dataclass(frozen=True)
class ModelConfig:
    """One decoder. Every file format fills it; nothing else describes a model."""

    architecture: str  # the family's name, see models/architectures
    vocab_size: int  # rows of the embedding matrix; a padded vocabulary counts in full
    hidden_size: int  # width of the residual stream
    context_length: int  # most positions a request may have
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    rope: RopeSpec
    tied_embeddings: bool  # the output head is the embedding matrix

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def layer(self) -> LayerSpec:
        """What every layer looks like, where all are alike."""
        if any(layer != self.layers[0] for layer in self.layers):
            raise ValueError(f"the layers of this {self.architecture} differ")
        return self.layers[0]

    def with_layers(self, kept: Sequence[int]) -> "ModelConfig":
        """The same with only these layers."""
        return replace(self, layers=tuple(self.layers[index] for index in kept))

    def followed_by(self, more: "ModelConfig") -> "ModelConfig":
        """The same with another's layers after its own."""
        return replace(self, layers=(*self.layers, *more.layers))
