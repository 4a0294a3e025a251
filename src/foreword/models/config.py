"""Format-independent description of a decoder."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from foreword.errors import CheckpointError


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency-dependent scaling of rotary embeddings (Llama 3.1 and later)."""

    factor: float  # slow-down of low frequencies
    low_freq_factor: float  # longer wavelengths than original_context / this are scaled fully
    high_freq_factor: float  # shorter wavelengths than original_context / this are unchanged
    original_context: int  # context length of the pre-training


@dataclass(frozen=True)
class LinearRopeScaling:
    """Positions divided by a constant factor."""

    factor: float  # slow-down of every frequency


@dataclass(frozen=True)
class YarnRopeScaling:
    """YaRN: low frequencies are scaled, high ones are not."""

    factor: float  # slow-down of scaled frequencies
    original_context: int  # context length of the pre-training
    beta_fast: float = 32.0  # frequencies with more rotations are unchanged
    beta_slow: float = 1.0  # frequencies with fewer are scaled fully
    truncate: bool = True  # round the bounds to whole pairs


@dataclass(frozen=True)
class FrequencyFactors:
    """A divisor per rotary frequency: LongRoPE's, and how GGUF files store llama3 scaling."""

    factors: tuple[float, ...]  # one per frequency (rotated numbers / 2), fastest first


RopeScaling = Llama3RopeScaling | LinearRopeScaling | YarnRopeScaling | FrequencyFactors


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of heads, rotate-half layout."""

    theta: float  # base of the frequencies
    scaling: RopeScaling | None = None  # None: unscaled
    magnitude: float = 1.0  # factor of rotated dimensions (YaRN, LongRoPE)
    rotary_dim: int | None = None  # number of leading rotated dimensions per head; None: all


@dataclass(frozen=True)
class LatentSpec:
    """Latent attention (MLA): a token stores one short row, from which all heads compute keys and values.

    The row has `kv_rank` normalised numbers, and `rope_dim` rotated ones shared by all heads.
    """

    kv_rank: int  # width of the compressed keys and values
    query_rank: int | None  # rank of compressed queries; None: uncompressed
    nope_dim: int  # unrotated dimensions of a key
    rope_dim: int  # rotated dimensions of a key
    value_dim: int  # dimensions of a value
    eps: float = 1e-6  # of the compression norms; not in configs

    @property
    def row_dim(self) -> int:
        """Numbers stored per token."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention of one layer, or latent attention."""

    num_heads: int  # query heads
    num_kv_heads: int  # key/value heads; divides num_heads
    head_dim: int  # width of one head; need not be hidden_size / num_heads
    bias: bool = False  # q, k, v projections add a bias (Qwen2)
    output_bias: bool = False  # the output projection adds one too (Llama with attention_bias)
    qk_norm: bool = False  # per-head norm of queries and keys before rotation (Qwen3)
    window: int | None = None  # number of visible newest positions; None: all
    wide_qk_norm: bool = False  # one norm over all heads (OLMo 2)
    scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    softcap: float | None = None  # soft cap of scores (Gemma 2)
    is_rotated: bool = True  # False: no rotary embedding (some SmolLM3 layers)
    rope: RopeSpec | None = None  # overrides the model's (Gemma 3's local layers)
    latent: LatentSpec | None = None  # None: keys and values are stored directly
    gated: bool = False  # head outputs are gated by a sigmoid computed with the query (Qwen3-Next)
    sinks: bool = False  # attention sinks: each head's softmax has one more score, of no position (gpt-oss)

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def query_rows(self) -> int:
        """Output width of the query projection: per head the query, and its gate if any."""
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
        """Rotatable dimensions of a head."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def kept(self) -> tuple[int, int, int | None]:
        """Heads, key size, and value size (None: as the key) of a token's stored row."""
        if self.latent is not None:
            return 1, self.latent.row_dim, 0
        return self.num_kv_heads, self.head_dim, None


class Recurrence(Enum):
    """Way in which a recurrent layer mixes positions, after its short convolution."""

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
    conv_bias: bool = False
    bias: bool = False  # of the input and output projections
    norm_groups: int = 1  # groups of the norm after Mamba-2, each normalised alone
    time_limits: tuple[float, float] = (0.0, math.inf)  # of Mamba-2's time steps

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


class Scores(Enum):
    """Score function of a router."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class GroupScore(Enum):
    """Score of a group of experts."""

    MAX = "max"  # its best expert's
    TOP2 = "top2"  # sum of its two best


CLAMPED_SLOPE = 1.702
"""Slope of clamped experts: (up + 1) * gate * sigmoid(slope * gate).

The gate is at most `clamp`; `up` is between `-clamp` and `clamp`.
"""


@dataclass(frozen=True)
class ExpertsSpec:
    """Routed experts: each token uses those with the best scores, within the best groups."""

    count: int
    per_token: int  # experts per token
    size: int  # width of an expert
    scores: Scores = Scores.SOFTMAX
    normalize: bool = False  # normalise the selected weights to sum 1
    scale: float = 1.0  # factor of the weights, afterwards
    corrected: bool = False  # a bias is added to the scores for selection only
    groups: int = 1
    top_groups: int = 1  # groups that a token may select from
    group_score: GroupScore = GroupScore.MAX
    shared_gate: bool = False  # the shared expert's output is gated by a sigmoid (Qwen2-MoE)
    bias: bool = False  # router and expert projections have biases (gpt-oss)
    clamp: float | None = None  # limit of gate and up, combined as at `CLAMPED_SLOPE` (gpt-oss)


@dataclass(frozen=True)
class MlpSpec:
    """Gated MLP of one layer: down(activation(gate(x)) * up(x)); with experts, the shared one."""

    intermediate_size: int  # 0 in a mixture without shared experts; 0 without experts: no MLP
    bias: bool = False  # the three projections add one
    activation: str = "silu"
    experts: ExpertsSpec | None = None  # None: dense
    gated: bool = True  # False: down(activation(up(x))), also in experts (Nemotron-H)


@dataclass(frozen=True)
class NormSpec:
    """Normalisation before attention, before the MLP and at the end."""

    eps: float  # added to the mean square before the root
    kind: str = "rms"


class Norms(Enum):
    """Position of the norms in a layer."""

    BEFORE = "before"  # inputs of attention and MLP
    AFTER = "after"  # outputs of attention and MLP (OLMo 2)
    AROUND = "around"  # both (Gemma 2)
    SINGLE = "single"  # one input: the layer has attention, a recurrence or an MLP alone (Nemotron-H)


@dataclass(frozen=True)
class LayerSpec:
    """One layer: attention or recurrence, then the MLP, each added to the residual stream."""

    attention: AttentionSpec
    mlp: MlpSpec
    norms: Norms = Norms.BEFORE
    residual_scale: float = 1.0  # factor of sublayer outputs (Granite)
    recurrent: RecurrentSpec | None = None  # replaces attention; None: attention
    mixes: bool = True  # False: neither attention nor recurrence

    @property
    def has_attention(self) -> bool:
        return self.mixes and self.recurrent is None

    @property
    def has_mlp(self) -> bool:
        return self.mlp.intermediate_size > 0 or self.mlp.experts is not None


@dataclass(frozen=True)
class ModelConfig:
    """Description of a decoder, filled in by every file format."""

    architecture: str  # the family's name, see models/architectures
    vocab_size: int  # rows of the embedding matrix, including padding
    hidden_size: int  # width of the residual stream
    context_length: int  # maximum positions
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    rope: RopeSpec
    tied_embeddings: bool  # the output head is the embedding matrix
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
        found = [window for window in windows if window is not None]
        return max(found, default=None) if len(found) == len(windows) else None

    @property
    def recurrent(self) -> RecurrentSpec | None:
        found = {layer.recurrent for layer in self.layers if layer.recurrent is not None}
        if len(found) > 1:
            raise CheckpointError(
                f"the recurrent layers of this {self.architecture} model differ; use another"
            )
        return found.pop() if found else None

    @property
    def places(self) -> tuple[int, ...]:
        """Each layer's number among the layers of its kind: with attention, recurrent, or with an MLP alone."""
        kinds = [(layer.has_attention, layer.mixes) for layer in self.layers]
        return tuple(kinds[:index].count(kind) for index, kind in enumerate(kinds))

    @property
    def layer(self) -> LayerSpec:
        if any(layer != self.layers[0] for layer in self.layers):
            raise CheckpointError(
                f"the layers of this {self.architecture} model differ, which is not supported here; use another model"
            )
        return self.layers[0]

    def with_layers(self, kept: Sequence[int]) -> "ModelConfig":
        return replace(self, layers=tuple(self.layers[index] for index in kept))

    def followed_by(self, more: "ModelConfig") -> "ModelConfig":
        """Return the config with another's layers appended."""
        return replace(self, layers=(*self.layers, *more.layers))
