"""Data classes that declare a model family."""

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


NEVER = ConfigSwitch()  # the family never has the feature
ALWAYS = ConfigSwitch(always=True)
BY_ATTENTION_BIAS = ConfigSwitch(key="attention_bias")
BY_NORM_TOPK = ConfigSwitch(key="norm_topk_prob", default=True)


class DenseLayers(Enum):
    """Rule for the layers that have a dense MLP instead of experts."""

    NONE = auto()
    FIRST = auto()  # the first `first_k_dense_replace` layers
    BY_STEP = auto()  # those in `mlp_only_layers`, and all except every `decoder_sparse_step`-th


class Grouping(Enum):
    """Rule for selecting experts within groups of experts."""

    NONE = auto()  # from all experts
    ALWAYS = auto()  # within the best `topk_group` of `n_group` groups
    BY_METHOD = auto()  # as ALWAYS if `topk_method` is group_limited_greedy, otherwise as NONE


@dataclass(frozen=True)
class ExpertKeys:
    """Keys of config.json that describe a mixture of experts, and properties that it does not state.

    The fields have the meaning of the same fields in `ExpertsSpec`, unless a comment says otherwise.
    """

    count: tuple[str, ...]  # alternative keys; the first that is present is used
    size: str = "moe_intermediate_size"
    per_token: str = "num_experts_per_tok"
    scores: Scores = Scores.SOFTMAX
    normalize: ConfigSwitch = NEVER
    corrected: bool = False
    scale: str | None = None
    grouping: Grouping = Grouping.NONE
    group_score: GroupScore = GroupScore.MAX
    shared_size: str | None = None  # intermediate size of the shared expert
    shared_count: str | None = None  # the same, as a multiple of the size of a routed expert
    shared_gate: bool = False
    bias: bool = False
    clamp: tuple[str, float] | None = None  # key, and the value if it is missing
    dense: DenseLayers = DenseLayers.NONE


class WindowedLayers(Enum):
    """Rule for the layers with a sliding window, if config.json has no `layer_types`."""

    ALL = auto()
    LAST = auto()  # from `max_window_layers` on
    ALL_BUT_EVERY_NTH = auto()  # see `WindowField.period`
    UNROTATED = auto()  # layers without rotary embedding


@dataclass(frozen=True)
class WindowField:
    """How config.json describes sliding windows."""

    layers: WindowedLayers
    switch: str | None = None  # flag that enables windows
    listed: bool = True  # `layer_types`, if present, lists the layers
    period: int = 1  # one in this many layers has full attention
    period_key: str | None = None  # key whose value replaces `period`


@dataclass(frozen=True)
class Scales:
    """Keys of scaling factors and soft caps in config.json; None: the family has none."""

    embedding: str | None = None  # factor of embeddings
    embedding_by_width: bool = False  # the factor of embeddings is the root of the hidden size
    residual: str | None = None  # factor of the outputs of sublayers
    attention: str | None = None  # factor of attention scores, instead of 1 / sqrt(head size)
    attention_root: str | None = None  # a value v that stands for the factor 1 / sqrt(v)
    attention_cap: str | None = None  # soft cap of attention scores
    logits_divisor: str | None = None
    logits_cap: str | None = None  # soft cap of logits


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of a family. Values are defaults for keys that config.json lacks."""

    theta: float = 10000.0  # of `rope_theta`
    partial: float = 1.0  # of `partial_rotary_factor`, the fraction of rotated dimensions
    # Of `rope_local_base_freq`, the base of windowed layers; None: they have the same base as the others.
    local_theta: float | None = None
    # One in this many layers has no rotary embedding, unless `no_rope_layers` is present; None: all layers have it.
    unrotated_every: int | None = None
    yarn_is_longrope: bool = False  # the rope type "yarn" is a legacy name of LongRoPE
    yarn_truncates: bool = True  # of `truncate`: YaRN's ramp begins and ends at whole dimensions
    interleaved: bool = False  # rotated pairs are adjacent in the stored weights
    by_type: bool = False  # layers have rotary embedding only if `position_embedding_type` is "rope"


@dataclass(frozen=True)
class RecurrentKeys:
    """Keys of config.json that describe recurrent layers as `RecurrentSpec` does; None: the family has none."""

    kind: Recurrence
    kernel: str
    heads: str | None = None
    value_dim: str | None = None  # None: the hidden size
    key_heads: str | None = None
    key_dim: str | None = None
    conv_bias: str | None = None
    conv_bias_default: bool = False
    bias: str | None = None
    attention_layers: str | None = None  # list of the layers with attention, read if `layer_types` is missing
    attention_period: int = 4  # without both lists, one in this many layers has attention
    grouped_norm: bool = False  # the norm after Mamba-2 normalises the channels of each key head separately


TOP_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",  # of LFM2
    "output": "lm_head",
}
"""GGUF names of tensors outside the layers -> canonical names."""

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
"""GGUF names in a layer of Llama's kind -> canonical names."""

QK_NORM_TENSORS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}

EXPERT_TENSORS = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
"""GGUF names of a mixture's router and shared experts."""

AROUND_TENSORS = LLAMA_TENSORS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""GGUF names in a layer with norms after its sublayers, or both before and after them."""

RECURRENT_TENSORS = {
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
"""GGUF names in a recurrent layer with a state."""

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
    """How a family's safetensors differ from canonical names and contents."""

    renamed: tuple[tuple[str, str], ...] = ()  # (part of a stored name, canonical part), in this order
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # stored matrix -> matrices in it
    norms_minus_one: bool = False  # weights of norms are stored minus one
    stacked_experts: ExpertStacks = ExpertStacks.NONE
    grouped_by_key: bool = False  # rows of fused projections of recurrent layers are grouped by key head


@dataclass(frozen=True)
class GgufNames:
    """How the GGUF files of a family differ from Hugging Face's directories."""

    architecture: str  # value of general.architecture, and prefix of the family's metadata keys
    # Names within a layer: blk.N.key -> model.layers.N.value
    layer_tensors: Mapping[str, str] = field(default_factory=lambda: LLAMA_TENSORS)
    interleaved: bool = False  # rotated pairs are adjacent in the rows of a head
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # stored matrix -> matrices in it
    # Values of settings that the metadata lacks, by config.json keys.
    settings: Mapping[str, object] = field(default_factory=dict)
    windows_everywhere: bool = False  # a sliding window in the metadata applies to all layers
    # Models with this many layers scale scores by 1 / sqrt(hidden size / heads) instead of 1 / sqrt(head size).
    deep: int | None = None  # number of layers
    # With `interleaved`: the order applies to all rows, even if only some are rotated.
    interleaved_whole: bool = False
    grouped_by_key: bool = False  # rows of fused projections of recurrent layers are grouped by key head
    tiled_values: bool = False  # value heads: the first of every key head, then the second of each, ...
    # Metadata key that only files of this family have, if several families share the architecture.
    marked_by: str | None = None


@dataclass(frozen=True)
class Architecture:
    """Declaration of a model family: everything in which families differ."""

    name: str
    models: str  # well-known models, for the table of supported models
    hf_class: str  # entry of `architectures` in config.json; the class is never imported or executed
    with_images: str | None = None  # class of models with images, whose text part is loaded
    # None: there are no GGUF files, or they are described as those of another family.
    gguf: GgufNames | None = None
    gguf_alias: str | None = None  # general.architecture of that other family
    attention_bias: ConfigSwitch = NEVER  # biases of the q, k and v projections
    output_bias: ConfigSwitch = NEVER  # bias of the attention's output projection
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
    has_gated_attention: bool = False  # `AttentionSpec.gated`
    recurrent: RecurrentKeys | None = None  # recurrent layers; None: all layers have attention
    # If num_key_value_heads is missing, it equals the number of query heads.
    kv_heads_may_be_missing: bool = False
    activation_key: str = "hidden_act"  # key of config.json
    activation: str = "silu"  # if the key is missing
    norm_eps: str = "rms_norm_eps"  # key of the norms' epsilon
    mlp_size: str = "intermediate_size"  # key of the MLP's intermediate size
    ungated_mlp: bool = False
    adjusted_mlp: bool = False  # `block_auto_adjust_ff_dim` shrinks the MLP (LFM2)
    without_experts: "Architecture | None" = None  # variant for models whose config.json has no experts
    stored: StoredTensors = StoredTensors()


QWEN_WINDOW = WindowField(WindowedLayers.LAST, switch="use_sliding_window")
