"""Data structures that declare a model family."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from foreword.models.config import GroupScore, Norms, Recurrence, Scores


@dataclass(frozen=True)
class ConfigSwitch:
    """A feature that a family never has, always has, or has according to config.json."""

    always: bool = False
    key: str | None = None  # boolean key of config.json
    default: bool = False  # if the key is missing


NEVER = ConfigSwitch()
ALWAYS = ConfigSwitch(always=True)
BY_ATTENTION_BIAS = ConfigSwitch(key="attention_bias")
BY_NORM_TOPK = ConfigSwitch(key="norm_topk_prob", default=True)


class DenseLayers(Enum):
    """Rule for the layers that have a dense MLP instead of experts."""

    NONE = auto()
    FIRST = auto()  # number in `first_k_dense_replace`
    BY_STEP = auto()  # those in `mlp_only_layers`, and those between multiples of `decoder_sparse_step`


class Grouping(Enum):
    """Return whether experts are selected in groups."""

    NONE = auto()
    ALWAYS = auto()  # by `n_group` and `topk_group`
    BY_METHOD = auto()  # if `topk_method` is group_limited_greedy


@dataclass(frozen=True)
class ExpertKeys:
    """Keys of config.json that describe a mixture of experts."""

    count: tuple[str, ...]  # the first one present
    size: str = "moe_intermediate_size"
    per_token: str = "num_experts_per_tok"
    scores: Scores = Scores.SOFTMAX
    normalize: ConfigSwitch = NEVER
    corrected: bool = False
    scale: str | None = None
    grouping: Grouping = Grouping.NONE
    group_score: GroupScore = GroupScore.MAX
    shared_size: str | None = None  # width of the shared expert
    shared_count: str | None = None  # or its width in experts
    shared_gate: bool = False
    bias: bool = False
    clamp: str | None = None
    dense: DenseLayers = DenseLayers.NONE


class WindowedLayers(Enum):
    """Rule for the layers with a sliding window, if config.json has no `layer_types`."""

    ALL = auto()
    LAST = auto()  # from `max_window_layers` on
    ALL_BUT_EVERY_NTH = auto()  # see `WindowField.period`
    UNROTATED = auto()  # layers without rotary embedding


@dataclass(frozen=True)
class WindowField:
    """Description of sliding windows in config.json."""

    layers: WindowedLayers
    switch: str | None = None  # flag that enables windows
    listed: bool = True  # `layer_types`, if present, lists the layers
    period: int = 1  # one of this many layers has full attention
    period_key: str | None = None  # key that overrides the period


@dataclass(frozen=True)
class Scales:
    """Keys of scaling factors and soft caps; None: not used."""

    embedding: str | None = None  # of embeddings
    embedding_by_width: bool = False  # embeddings are scaled by the root of the hidden size
    residual: str | None = None  # of each layer's output
    attention: str | None = None  # of attention scores, instead of 1 / sqrt(head size)
    attention_root: str | None = None  # the same, as the inverse square of the factor
    attention_cap: str | None = None
    logits_divisor: str | None = None
    logits_cap: str | None = None


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of a family."""

    theta: float = 10000.0  # default of config.json
    partial: float = 1.0  # default fraction of rotated dimensions
    local_theta: float | None = None  # base frequency of windowed layers, or `rope_local_base_freq`
    # one of this many layers is not rotated, unless `no_rope_layers` is present
    unrotated_every: int | None = None
    yarn_is_longrope: bool = False  # legacy name
    yarn_truncates: bool = True  # default of config.json: YaRN's ramp begins and ends at whole dimensions
    interleaved: bool = False  # rotated pairs are adjacent in the stored weights
    by_type: bool = False  # layers are rotated only if `position_embedding_type` is "rope"


@dataclass(frozen=True)
class RecurrentKeys:
    """Keys of config.json that describe the recurrent layers; None: not used."""

    kind: Recurrence
    kernel: str
    heads: str | None = None
    value_dim: str | None = None  # None: the hidden size
    key_heads: str | None = None
    key_dim: str | None = None
    conv_bias: str | None = None
    conv_bias_default: bool = False
    bias: str | None = None
    attention_layers: str | None = None  # list of the layers with attention, if there are no `layer_types`
    attention_period: int = 4  # otherwise: one of this many layers has attention
    grouped_norm: bool = False  # the norm of Mamba-2 is one per key head


TOP_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",  # of LFM2
    "output": "lm_head",
}
"""GGUF names outside the layers."""

LLAMA_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF names inside a llama-style layer."""

QK_NORM_TENSORS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}

EXPERT_TENSORS = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
"""GGUF names of a mixture, besides the stacked experts."""

AROUND_TENSORS = LLAMA_TENSORS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""GGUF names in a layer with norms after, or around, both sublayers."""

RECURRENT_TENSORS = {
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
"""GGUF names in a layer with a state."""

LATENT_TENSORS = LLAMA_TENSORS | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",  # older files; newer ones have two parts
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
"""GGUF names in a layer with latent attention."""


class ExpertStacks(Enum):
    """Layout of tensors that hold all experts of a layer."""

    NONE = auto()
    INTERLEAVED = auto()  # gate and up rows in turn, stored [in, out]; may be MXFP4
    HALVES = auto()  # gate rows, then up rows, stored [out, in]


@dataclass(frozen=True)
class StoredTensors:
    """Differences of a family's safetensors from the canonical names and contents."""

    renamed: tuple[tuple[str, str], ...] = ()  # (part of a stored name, canonical part)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # stored matrix -> its parts
    norms_minus_one: bool = False  # norm weights are stored minus one
    stacked_experts: ExpertStacks = ExpertStacks.NONE
    # rows of the fused projections of recurrent layers are grouped by key head
    grouped_by_key: bool = False


@dataclass(frozen=True)
class GgufNames:
    """GGUF names of a family, and the mapping of its tensors to Hugging Face names."""

    architecture: str  # general.architecture, and the prefix of its keys
    layer_tensors: Mapping[str, str] = field(
        default_factory=lambda: LLAMA_TENSORS
    )  # blk.N.X -> model.layers.N.Y
    interleaved: bool = False  # rotated pairs are adjacent in the rows of a head
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # stored matrix -> its parts
    settings: Mapping[str, object] = field(
        default_factory=dict
    )  # defaults of missing settings, by config.json keys
    windows_everywhere: bool = False  # a sliding window in the metadata applies to all layers
    # models with this many layers scale scores by hidden size / heads instead of head size
    deep: int | None = None
    interleaved_whole: bool = (
        False  # adjacent pairs are those of whole heads, even if a part of them is rotated
    )
    grouped_by_key: bool = False  # rows of fused projections of recurrent layers are grouped by key head
    tiled_values: bool = False  # value heads: the first of every key head, then the second of every one
    marked_by: str | None = (
        None  # setting that only files of this family have, if several share the architecture
    )


@dataclass(frozen=True)
class Architecture:
    """Declaration of a model family; everything else is common to all."""

    name: str
    models: str  # well-known models, for a table
    hf_class: str  # entry of `architectures` in config.json; never imported or executed
    with_images: str | None = None  # class of the same model with images, which are left out
    gguf: GgufNames | None = None  # None: no GGUF files, or under another family's name
    gguf_alias: str | None = None  # that family's name
    attention_bias: ConfigSwitch = NEVER  # of the q, k and v projections
    output_bias: ConfigSwitch = NEVER  # of the attention's output projection
    mlp_bias: ConfigSwitch = NEVER
    qk_norm: ConfigSwitch = NEVER
    wide_qk_norm: bool = False
    norms: Norms = Norms.BEFORE
    window: WindowField | None = None
    scales: Scales = Scales()
    rope: Rope = Rope()
    experts: ExpertKeys | None = None
    is_latent: bool = False  # latent attention (MLA)
    has_sinks: bool = False  # attention sinks
    has_gated_attention: bool = False  # head outputs are gated
    recurrent: RecurrentKeys | None = None  # layers with a state; None: all layers have attention
    kv_heads_may_be_missing: bool = False  # num_key_value_heads; defaults to the query heads
    activation_key: str = "hidden_act"
    activation: str = "silu"  # default of config.json
    norm_eps: str = "rms_norm_eps"  # key of the norms' epsilon
    mlp_size: str = "intermediate_size"
    ungated_mlp: bool = False
    adjusted_mlp: bool = False  # `block_auto_adjust_ff_dim` shrinks the MLP (LFM2)
    without_experts: "Architecture | None" = None  # models whose config.json has no experts
    stored: StoredTensors = StoredTensors()


QWEN_WINDOW = WindowField(WindowedLayers.LAST, switch="use_sliding_window")
