"""Description of a decoder, independent of file formats."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from foreword.errors import CheckpointError


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency-dependent scaling of rotary embeddings (Llama 3.1 and later)."""

    factor: float  # divisor of low frequencies
    low_freq_factor: float  # wavelengths above original_context / low_freq_factor are scaled fully
    high_freq_factor: float  # wavelengths below original_context / high_freq_factor are unchanged
    original_context: int  # context length of the pre-training


@dataclass(frozen=True)
class LinearRopeScaling:
    """Positions divided by a constant factor."""

    factor: float  # divisor of every frequency


@dataclass(frozen=True)
class YarnRopeScaling:
    """YaRN: low frequencies are scaled, high ones are not."""

    factor: float  # divisor of scaled frequencies
    original_context: int  # context length of the pre-training
    beta_fast: float = 32.0  # frequencies with more rotations within the original context are unchanged
    beta_slow: float = 1.0  # frequencies with fewer rotations are scaled fully
    truncate: bool = True  # round the bounds between scaled and unchanged to whole pairs of dimensions


@dataclass(frozen=True)
class FrequencyFactors:
    """A divisor per rotary frequency: LongRoPE's, and how GGUF files store llama3 scaling."""

    factors: tuple[float, ...]  # one per frequency (rotated dimensions / 2), highest frequency first


RopeScaling = Llama3RopeScaling | LinearRopeScaling | YarnRopeScaling | FrequencyFactors


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding, in the rotate-half layout."""

    theta: float  # base of the frequencies
    scaling: RopeScaling | None = None  # None: unscaled
    magnitude: float = 1.0  # factor of the rotated dimensions (YaRN, LongRoPE)
    rotary_dim: int | None = None  # the first dimensions of a head, which are rotated; None: all


@dataclass(frozen=True)
class LatentSpec:
    """Latent attention (MLA): a token stores one short row, from which all heads compute keys and values.

    The row has `kv_rank` normalised numbers, and `rope_dim` rotated ones shared by all heads.
    """

    kv_rank: int  # width of the compressed keys and values
    query_rank: int | None  # width of compressed queries; None: queries are not compressed
    nope_dim: int  # unrotated dimensions of a key
    rope_dim: int  # rotated dimensions of a key
    value_dim: int  # dimensions of a value
    eps: float = 1e-6  # epsilon of the norms of compressed rows; configs do not state it

    @property
    def row_dim(self) -> int:
        """Numbers stored per token."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class AttentionSpec:
    """Attention of one layer: grouped-query attention or latent attention."""

    num_heads: int  # query heads
    num_kv_heads: int  # key/value heads; divides num_heads
    head_dim: int  # width of one head; need not be hidden_size / num_heads
    bias: bool = False  # the q, k and v projections add a bias (Qwen2)
    output_bias: bool = False  # the output projection adds a bias (Llama with attention_bias)
    qk_norm: bool = False  # per-head norm of queries and keys before rotation (Qwen3)
    window: int | None = None  # number of newest positions that a token attends to; None: all
    wide_qk_norm: bool = False  # norm of queries and keys over all heads together (OLMo 2)
    scale: float | None = None  # factor of the scores; None: 1 / sqrt(head_dim)
    softcap: float | None = None  # soft cap of scores (Gemma 2)
    is_rotated: bool = True  # False: no rotary embedding (some SmolLM3 layers)
    rope: RopeSpec | None = None  # replaces the model's rotary embedding (Gemma 3's local layers)
    latent: LatentSpec | None = None  # None: grouped-query attention
    gated: bool = False  # head outputs are multiplied by a sigmoid, computed with the query (Qwen3-Next)
    sinks: bool = False  # attention sinks: each head's softmax has one more score, of no position (gpt-oss)

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def query_rows(self) -> int:
        """Output width of the query projection, which includes the gates if there are any."""
        return self.query_width * (2 if self.gated else 1)

    @property
    def kv_width(self) -> int:
        """Output width of the key (or value) projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def output_width(self) -> int:
        """Input width of the output projection."""
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head to which rotary embedding may apply."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def kv_row_sizes(self) -> tuple[int, int, int | None]:
        """(heads, key size, value size) of a token's KV row; None: values have the size of keys."""
        if self.latent is not None:
            return 1, self.latent.row_dim, 0
        return self.num_kv_heads, self.head_dim, None


class Recurrence(Enum):
    """How a recurrent layer mixes positions after its short convolution."""

    DELTA = "gated delta rule"  # Qwen3-Next, Qwen3.5
    SSM = "Mamba-2"
    NONE = "short convolution"  # LFM2


@dataclass(frozen=True)
class RecurrentSpec:
    """A recurrent layer: a convolution over the newest positions, then a state, instead of attention.

    The state of a head is a matrix [key_dim, value_dim]. `Recurrence.NONE` has no state, and one head.
    """

    kind: Recurrence
    kernel: int  # positions that the convolution reads, the token's own included
    heads: int  # value heads
    value_dim: int
    key_heads: int = 0  # divides `heads`
    key_dim: int = 0
    conv_bias: bool = False  # the convolution adds a bias
    bias: bool = False  # the input and output projections add a bias
    norm_groups: int = 1  # groups of channels that the norm after Mamba-2 normalises separately
    time_limits: tuple[float, float] = (0.0, math.inf)  # (minimum, maximum) of Mamba-2's Δ
    # Tensor parallelism: the only norm group is split over the ranks, which sum its squares.
    shared_norm: bool = False

    @property
    def value_width(self) -> int:
        return self.heads * self.value_dim

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def channels(self) -> int:
        """Numbers per token that enter the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def sections(self) -> tuple[int, ...]:
        """Widths of what enters the convolution, in order."""
        match self.kind:
            case Recurrence.DELTA:
                return self.key_width, self.key_width, self.value_width
            case Recurrence.SSM:
                return self.value_width, self.key_width, self.key_width
            case Recurrence.NONE:
                return (self.value_width,)


class Scores(Enum):
    """Score function of a router."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class GroupScore(Enum):
    """Score of a group of experts."""

    MAX = "max"  # the largest score of its experts
    TOP2 = "top2"  # the sum of the two largest


CLAMPED_SLOPE = 1.702
"""Slope in the activation of clamped experts: (up + 1) * gate * sigmoid(slope * gate).

`gate` is at most `ExpertsSpec.clamp`, and `up` between -clamp and clamp.
"""


@dataclass(frozen=True)
class ExpertsSpec:
    """Routed experts: each token uses the experts with the best scores, within the best groups."""

    count: int
    per_token: int  # experts per token
    size: int  # intermediate size of an expert
    scores: Scores = Scores.SOFTMAX
    normalize: bool = False  # normalise the weights of the selected experts to sum 1
    scale: float = 1.0  # factor of the weights, after normalisation
    corrected: bool = False  # a bias is added to the scores for selection, but not to the weights
    groups: int = 1
    top_groups: int = 1  # number of groups from which a token selects experts
    group_score: GroupScore = GroupScore.MAX
    shared_gate: bool = False  # the shared expert's output is multiplied by a sigmoid (Qwen2-MoE)
    bias: bool = False  # router and expert projections have biases (gpt-oss)
    clamp: float | None = None  # limit of gate and up, combined as at `CLAMPED_SLOPE` (gpt-oss)


@dataclass(frozen=True)
class MlpSpec:
    """The MLP of one layer: down(activation(gate(x)) * up(x)). With routed experts, it describes the shared expert."""

    intermediate_size: int  # 0: no MLP; with `experts`: no shared expert
    bias: bool = False  # the projections add a bias
    activation: str = "silu"
    experts: ExpertsSpec | None = None  # routed experts; None: dense
    gated: bool = True  # False: down(activation(up(x))), in routed experts too (Nemotron-H)


@dataclass(frozen=True)
class NormSpec:
    """The norms of all layers and the final norm."""

    eps: float  # added to the mean square before the root
    kind: str = "rms"


class Norms(Enum):
    """Position of the norms in a layer."""

    BEFORE = "before"  # inputs of attention and MLP
    AFTER = "after"  # outputs of attention and MLP (OLMo 2)
    AROUND = "around"  # both (Gemma 2)
    SINGLE = "single"  # one norm, of the layer's input: the layer has only one sublayer (Nemotron-H)


@dataclass(frozen=True)
class LayerSpec:
    """One layer: attention or recurrence, then the MLP, each added to the residual stream."""

    attention: AttentionSpec
    mlp: MlpSpec
    norms: Norms = Norms.BEFORE
    residual_scale: float = 1.0  # factor of the outputs of sublayers (Granite)
    recurrent: RecurrentSpec | None = None  # recurrence instead of attention; None: attention
    mixes: bool = True  # False: the layer has neither attention nor recurrence

    @property
    def has_attention(self) -> bool:
        return self.mixes and self.recurrent is None

    @property
    def has_mlp(self) -> bool:
        return self.mlp.intermediate_size > 0 or self.mlp.experts is not None


@dataclass(frozen=True)
class ModelConfig:
    """Description of a decoder, filled in by every file format."""

    architecture: str  # name of the model family, see models/architectures
    vocab_size: int  # rows of the embedding matrix, including padding
    hidden_size: int  # width of the residual stream
    context_length: int  # maximum number of positions
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    rope: RopeSpec
    tied_embeddings: bool  # the embedding matrix is also the output matrix
    embedding_scale: float = 1.0  # factor of embeddings (Gemma, Granite)
    logit_scale: float = 1.0  # factor of logits (Granite)
    logit_softcap: float | None = None  # soft cap of logits (Gemma 2)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def widest_window(self) -> int | None:
        """Largest window of any layer; None: some layer has full attention."""
        windows = [layer.attention.window for layer in self.layers if layer.has_attention]
        limited = [window for window in windows if window is not None]
        return max(limited, default=None) if len(limited) == len(windows) else None

    @property
    def recurrent(self) -> RecurrentSpec | None:
        """The description that all recurrent layers share; None: there are none. Raises if they differ."""
        specs = {layer.recurrent for layer in self.layers if layer.recurrent is not None}
        if len(specs) > 1:
            raise CheckpointError(
                f"the recurrent layers of this {self.architecture} model differ; use another"
            )
        return specs.pop() if specs else None

    @property
    def places(self) -> tuple[int, ...]:
        """Index of each layer among the layers of its kind: with attention, with a recurrence, or with neither."""
        kinds = [(layer.has_attention, layer.mixes) for layer in self.layers]
        return tuple(kinds[:index].count(kind) for index, kind in enumerate(kinds))

    @property
    def layer(self) -> LayerSpec:
        """The description that all layers share. Raises if they differ."""
        if any(layer != self.layers[0] for layer in self.layers):
            raise CheckpointError(
                f"the layers of this {self.architecture} model differ, which is not supported here; use another model"
            )
        return self.layers[0]

    def with_layers(self, indices: Sequence[int]) -> "ModelConfig":
        """Return the config with only the layers of these indices."""
        return replace(self, layers=tuple(self.layers[index] for index in indices))

    def followed_by(self, more: "ModelConfig") -> "ModelConfig":
        """Return the config with another's layers appended."""
        return replace(self, layers=(*self.layers, *more.layers))
