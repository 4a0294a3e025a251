"""What a decoder looks like, whatever file it came from: its layers, made of declared parts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from foreword.errors import CheckpointError


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
    magnitude: float = 1.0  # rotated numbers are multiplied with it (YaRN, LongRoPE)
    rotary_dim: int | None = None  # only this many numbers at the start of a head turn; None: all


@dataclass(frozen=True)
class LatentSpec:
    """Latent attention (MLA): a token keeps one short row, from which all heads compute their keys and values.

    The row has `kv_rank` numbers that are normed, and `rope_dim` that are rotated and shared by all heads.
    """

    kv_rank: int  # width of the compressed keys and values
    query_rank: int | None  # width that queries are compressed to; None: they are not
    nope_dim: int  # numbers of a key that are not rotated
    rope_dim: int  # those that are
    value_dim: int  # numbers of a value
    eps: float = 1e-6  # of the norms on what is compressed, which no config names

    @property
    def row_dim(self) -> int:
        """Numbers that a token keeps."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention of one layer, or latent attention."""

    num_heads: int  # query heads
    num_kv_heads: int  # key/value heads; divides num_heads
    head_dim: int  # width of one head; need not be hidden_size / num_heads
    bias: bool = False  # q, k, v projections add a bias (Qwen2)
    output_bias: bool = False  # the output projection adds one too (Llama with attention_bias)
    qk_norm: bool = False  # norm on every query and key head before rotation (Qwen3)
    window: int | None = None  # only this many of the newest positions are seen; None: all
    wide_qk_norm: bool = False  # that norm takes all heads together (OLMo 2)
    scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    softcap: float | None = None  # scores are squashed between this and minus this (Gemma 2)
    is_rotated: bool = True  # whether positions turn queries and keys (SmolLM3 has layers without)
    rope: RopeSpec | None = None  # other than the model's (Gemma 3's local layers)
    latent: LatentSpec | None = None  # None: keys and values are kept as they are
    gated: bool = False  # what a head saw is weighed by a sigmoid, made beside its query (Qwen3-Next)

    @property
    def query_width(self) -> int:
        """Numbers of all queries."""
        return self.num_heads * self.head_dim

    @property
    def query_rows(self) -> int:
        """Columns of the query projection's output: of each head the query, followed by its gate if there is one."""
        return self.query_width * (2 if self.gated else 1)

    @property
    def kv_width(self) -> int:
        """Columns of the key (or value) projection's output."""
        return self.num_kv_heads * self.head_dim

    @property
    def output_width(self) -> int:
        """Columns of the output projection's input."""
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that positions may turn."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def kept(self) -> tuple[int, int, int | None]:
        """What a token keeps: heads, numbers of a key, and of a value, None where they are as many."""
        if self.latent is not None:
            return 1, self.latent.row_dim, 0
        return self.num_kv_heads, self.head_dim, None


class Scores(Enum):
    """What a router makes of its logits."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class GroupScore(Enum):
    """How good a group of experts is."""

    MAX = "max"  # as its best expert
    TOP2 = "top2"  # as its two best together


@dataclass(frozen=True)
class ExpertsSpec:
    """Experts, of which every token takes some: those with the best scores, in the best groups."""

    count: int
    per_token: int  # experts that a token takes
    size: int  # width inside an expert
    scores: Scores = Scores.SOFTMAX
    normalize: bool = False  # the weights of the taken ones sum to one
    scale: float = 1.0  # of the weights, after that
    corrected: bool = False  # a bias is added to the scores for the choice, not for the weights
    groups: int = 1
    top_groups: int = 1  # groups that a token may take experts from
    group_score: GroupScore = GroupScore.MAX
    shared_gate: bool = False  # what the shared expert says is weighed by a sigmoid of its own (Qwen2-MoE)


@dataclass(frozen=True)
class MlpSpec:
    """The gated MLP of one layer: down(activation(gate(x)) * up(x)); with experts, it is the one shared by all."""

    intermediate_size: int  # width inside; 0 in a mixture without shared experts
    bias: bool = False  # the three projections add one
    activation: str = "silu"
    experts: ExpertsSpec | None = None  # None: this MLP alone


@dataclass(frozen=True)
class NormSpec:
    """Normalisation before attention, before the MLP and at the end."""

    eps: float  # added to the mean square before the root
    kind: str = "rms"


class Norms(Enum):
    """Where a layer has norms."""

    BEFORE = "before"  # attention and MLP read the normed stream
    AFTER = "after"  # what they say is normed (OLMo 2)
    AROUND = "around"  # both (Gemma 2)


@dataclass(frozen=True)
class LayerSpec:
    """One layer: attention, then the MLP, each added to the residual stream."""

    attention: AttentionSpec
    mlp: MlpSpec
    norms: Norms = Norms.BEFORE
    residual_scale: float = 1.0  # of what is added (Granite)


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
    embedding_scale: float = 1.0  # embeddings are multiplied with it (Gemma, Granite)
    logit_scale: float = 1.0  # logits are, too (Granite)
    logit_softcap: float | None = None  # logits are squashed between this and minus this (Gemma 2)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def widest_window(self) -> int | None:
        """How many of the newest positions any layer sees; None: some layer sees all."""
        windows = [layer.attention.window for layer in self.layers]
        found = [window for window in windows if window is not None]
        return max(found) if len(found) == len(windows) else None

    @property
    def layer(self) -> LayerSpec:
        """What every layer looks like, where all are alike."""
        if any(layer != self.layers[0] for layer in self.layers):
            raise CheckpointError(
                f"the layers of this {self.architecture} model differ, which is not supported here; use another model"
            )
        return self.layers[0]

    def with_layers(self, kept: Sequence[int]) -> "ModelConfig":
        """The same with only these layers."""
        return replace(self, layers=tuple(self.layers[index] for index in kept))

    def followed_by(self, more: "ModelConfig") -> "ModelConfig":
        """The same with another's layers after its own."""
        return replace(self, layers=(*self.layers, *more.layers))
