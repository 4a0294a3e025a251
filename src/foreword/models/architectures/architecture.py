"""How a model family is declared: what differs between families, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from foreword.models.config import GroupScore, Norms, Scores


@dataclass(frozen=True)
class ConfigSwitch:
    """Something that a family has never, always, or where its config.json says so."""

    always: bool = False
    key: str | None = None  # a true-or-false key of config.json
    default: bool = False  # where it is missing


NEVER = ConfigSwitch()


class DenseLayers(Enum):
    """Which layers have one MLP instead of experts."""

    NONE = auto()
    FIRST = auto()  # `first_k_dense_replace` says how many
    BY_STEP = auto()  # those that `mlp_only_layers` names, and those between `decoder_sparse_step`s


class Grouping(Enum):
    """Whether experts are chosen in groups."""

    NONE = auto()
    ALWAYS = auto()  # by `n_group` and `topk_group`
    BY_METHOD = auto()  # if `topk_method` is group_limited_greedy


@dataclass(frozen=True)
class ExpertKeys:
    """Which keys of config.json say what about a mixture."""

    count: tuple[str, ...]  # the first that is there
    size: str = "moe_intermediate_size"
    per_token: str = "num_experts_per_tok"
    scores: Scores = Scores.SOFTMAX
    normalize: ConfigSwitch = NEVER
    corrected: bool = False
    scale: str | None = None
    grouping: Grouping = Grouping.NONE
    group_score: GroupScore = GroupScore.MAX
    shared_size: str | None = None  # width of the shared expert
    shared_count: str | None = None  # or how many experts wide it is
    shared_gate: bool = False
    dense: DenseLayers = DenseLayers.NONE


class WindowedLayers(Enum):
    """Which layers of a family have the window, where its config.json has no `layer_types`."""

    ALL = auto()
    LAST = auto()  # those from `max_window_layers` on
    ALL_BUT_EVERY_NTH = auto()  # see `WindowField.period`
    UNROTATED = auto()  # those without rotary embedding


@dataclass(frozen=True)
class WindowField:
    """What a family's config.json says about sliding windows."""

    layers: WindowedLayers
    switch: str | None = None  # a flag without which no layer has one
    listed: bool = True  # `layer_types`, where it is there, says which layers
    period: int = 1  # every so many layers, one sees all
    period_key: str | None = None  # where config.json may say otherwise


@dataclass(frozen=True)
class Scales:
    """Keys of numbers that a family multiplies or squashes something with; None: it does not."""

    embedding: str | None = None  # on embeddings
    embedding_by_width: bool = False  # embeddings are multiplied with the root of their width
    residual: str | None = None  # on what a layer adds
    attention: str | None = None  # on scores, instead of 1 / sqrt(head size)
    attention_root: str | None = None  # the same, as the number whose inverse root it is
    attention_cap: str | None = None
    logits_divisor: str | None = None
    logits_cap: str | None = None


@dataclass(frozen=True)
class Rope:
    """What is particular about a family's rotary embedding."""

    theta: float = 10000.0  # where config.json names none
    partial: float = 1.0  # part of a head that turns, where config.json does not say
    local_theta: float | None = None  # windowed layers turn by this, or by `rope_local_base_freq`
    unrotated_every: int | None = None  # of so many layers one does not turn, unless `no_rope_layers` says
    yarn_is_longrope: bool = False  # an old name of it
    interleaved: bool = False  # rotated pairs stand side by side in the stored weights


@dataclass(frozen=True)
class StoredTensors:
    """How a family's tensors in safetensors differ from what they are called and hold here."""

    renamed: tuple[tuple[str, str], ...] = ()  # (part of a name, what it is called here)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # one matrix -> those it is made of
    norms_minus_one: bool = False  # the weights of norms are stored less one


@dataclass(frozen=True)
class GgufNames:
    """How GGUF spells a family, and which of its tensors Hugging Face knows under which name."""

    architecture: str  # general.architecture, and the prefix of its keys
    interleaved: bool  # rotated pairs stand side by side in the rows of a head, not half of them apart
    layer_tensors: Mapping[str, str]  # blk.N.<key> -> model.layers.N.<value>
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # one matrix -> those it is made of
    settings: Mapping[str, object] | None = None  # what files may leave unsaid, by keys of config.json
    deep: int | None = None  # models of so many layers scale scores by hidden size / heads, not by head size


@dataclass(frozen=True)
class Architecture:
    """What differs between families; all that is not here is the same for all of them."""

    name: str
    models: str  # those that people know, for a table
    hf_class: str  # the one entry of `architectures` in config.json; never imported or run
    gguf: GgufNames | None = None  # None: GGUF files are not read, or by another family's name
    gguf_alias: str | None = None  # that name
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
    kv_heads_may_be_missing: bool = False  # num_key_value_heads; then there are as many as query heads
    activation_key: str = "hidden_act"
    activation: str = "silu"  # where config.json names none
    stored: StoredTensors = StoredTensors()


TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""GGUF's names outside the layers."""

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
"""GGUF's names inside a layer of the llama kind."""

EXPERT_TENSORS = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
"""Beside those of all experts together."""

AROUND_TENSORS = LLAMA_TENSORS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""In a layer with norms around both halves, or only after them."""

LATENT_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",  # as old files have it; in others it is in two parts
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""In a layer with latent attention."""

QK_NORM_TENSORS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}

QWEN_WINDOW = WindowField(WindowedLayers.LAST, switch="use_sliding_window")
