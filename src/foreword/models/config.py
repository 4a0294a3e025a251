"""What a decoder of the llama family looks like, whatever file it came from."""

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
class FrequencyFactors:
    """A divisor per rotary frequency, as GGUF files store llama3 scaling."""

    factors: tuple[float, ...]  # one per frequency (head_dim / 2), fastest first


RopeScaling = Llama3RopeScaling | LinearRopeScaling | FrequencyFactors


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of one decoder. Every loader fills it; nothing else describes a model."""

    architecture: str  # family name: "llama", "mistral", "qwen2" or "qwen3"
    vocab_size: int  # rows of the embedding matrix; a padded vocabulary counts in full
    hidden_size: int  # width of the residual stream
    intermediate_size: int  # width inside the gated MLP
    num_layers: int  # decoder layers
    num_heads: int  # query heads
    num_kv_heads: int  # key/value heads; divides num_heads
    head_dim: int  # width of one head; need not be hidden_size / num_heads
    context_length: int  # most positions a request may have
    rms_norm_eps: float  # added to the mean square before the root
    rope_theta: float  # base of the rotary frequencies
    rope_scaling: RopeScaling | None  # None: plain rotary embedding
    attention_bias: bool  # q, k, v projections add a bias (Qwen2)
    output_bias: bool  # the attention output projection adds one too (Llama with attention_bias)
    mlp_bias: bool  # the three MLP projections add a bias
    qk_norm: bool  # RMS norm on every query and key head before rotation (Qwen3)
    tied_embeddings: bool  # the output head is the embedding matrix

    @property
    def query_width(self) -> int:
        """Columns of the query projection's output."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the key (or value) projection's output."""
        return self.num_kv_heads * self.head_dim
