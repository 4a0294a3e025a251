"""Model families with recurrent layers."""

from dataclasses import replace

from foreword.models.architectures.architecture import (
    ALWAYS,
    BY_ATTENTION_BIAS,
    BY_NORM_TOPK,
    EXPERT_TENSORS,
    LLAMA_TENSORS,
    QK_NORM_TENSORS,
    RECURRENT_TENSORS,
    Architecture,
    ConfigSwitch,
    DenseLayers,
    ExpertKeys,
    ExpertStacks,
    GgufNames,
    RecurrentKeys,
    Rope,
    StoredTensors,
)
from foreword.models.architectures.attention import GATED_EXPERTS, GRANITE, SIGMOID_EXPERTS
from foreword.models.config import Norms, Recurrence

DELTA = RecurrentKeys(
    kind=Recurrence.DELTA,
    kernel="linear_conv_kernel_dim",
    heads="linear_num_value_heads",
    value_dim="linear_value_head_dim",
    key_heads="linear_num_key_heads",
    key_dim="linear_key_head_dim",
)

MAMBA = RecurrentKeys(
    kind=Recurrence.SSM,
    kernel="mamba_d_conv",
    heads="mamba_n_heads",
    value_dim="mamba_d_head",
    key_heads="mamba_n_groups",
    key_dim="mamba_d_state",
    conv_bias="mamba_conv_bias",
    conv_bias_default=True,
    bias="mamba_proj_bias",
    attention_layers="attn_layer_indices",
)

_DELTA_TENSORS = (
    LLAMA_TENSORS
    | QK_NORM_TENSORS
    | RECURRENT_TENSORS
    | {
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
    }
)

_TEXT_PART = (("model.language_model.", "model."),)  # (stored prefix, our prefix) in checkpoints with images

QWEN3_5 = Architecture(
    "qwen3_5",
    "Qwen3.5 (text)",
    "Qwen3_5ForCausalLM",
    with_images="Qwen3_5ForConditionalGeneration",
    gguf=GgufNames("qwen35", _DELTA_TENSORS, tiled_values=True),
    attention_bias=BY_ATTENTION_BIAS,
    output_bias=BY_ATTENTION_BIAS,
    qk_norm=ALWAYS,
    rope=Rope(partial=0.25),
    has_gated_attention=True,
    recurrent=DELTA,
    stored=StoredTensors(renamed=_TEXT_PART, norms_minus_one=True),
)
"""Layers with the gated delta rule, three in four; the others have gated attention."""

QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe",
    models="Qwen3.5-MoE (text)",
    hf_class="Qwen3_5MoeForCausalLM",
    with_images="Qwen3_5MoeForConditionalGeneration",
    gguf=GgufNames("qwen35moe", _DELTA_TENSORS | EXPERT_TENSORS, tiled_values=True),
    experts=replace(GATED_EXPERTS, normalize=ALWAYS),
    stored=StoredTensors(
        renamed=(*_TEXT_PART, (".shared_expert.", ".shared_experts.")),
        norms_minus_one=True,
        stacked_experts=ExpertStacks.HALVES,
    ),
)
"""Qwen3.5 with experts; a layer's experts are stored as one tensor."""

QWEN3_NEXT = replace(
    QWEN3_5,
    name="qwen3_next",
    models="Qwen3-Next",
    hf_class="Qwen3NextForCausalLM",
    with_images=None,
    gguf=GgufNames(
        "qwen3next",
        _DELTA_TENSORS | EXPERT_TENSORS,
        fused={
            "ssm_ba": ("ssm_beta", "ssm_alpha"),
            "ssm_in": ("attn_qkv", "attn_gate"),  # older files
        },
        settings={"norm_topk_prob": True},
        grouped_by_key=True,
    ),
    experts=replace(GATED_EXPERTS, normalize=BY_NORM_TOPK),
    stored=StoredTensors(
        renamed=((".shared_expert.", ".shared_experts."),), norms_minus_one=True, grouped_by_key=True
    ),
)
"""Like Qwen3.5-MoE, with a query, key and value projection whose rows are grouped by key head."""

_MAMBA_PARTS = {
    "linear_attn.in_proj": ("linear_attn.in_proj_z", "linear_attn.in_proj_qkv", "linear_attn.in_proj_a")
}

_MAMBA_TENSORS = (
    LLAMA_TENSORS
    | RECURRENT_TENSORS
    | {
        "ssm_d": "linear_attn.D",
        "ssm_in_z": "linear_attn.in_proj_z",
        "ssm_in_qkv": "linear_attn.in_proj_qkv",
        "ssm_in_a": "linear_attn.in_proj_a",
    }
)
_MAMBA_GGUF_PARTS = {"ssm_in": ("ssm_in_z", "ssm_in_qkv", "ssm_in_a")}
_GRANITE_GGUF = GgufNames("granitehybrid", _MAMBA_TENSORS, interleaved=True, fused=_MAMBA_GGUF_PARTS)

BAMBA = Architecture(
    "bamba",
    "Bamba",
    "BambaForCausalLM",
    gguf=replace(_GRANITE_GGUF, interleaved_whole=True),
    attention_bias=BY_ATTENTION_BIAS,
    output_bias=BY_ATTENTION_BIAS,
    mlp_bias=ConfigSwitch(key="mlp_bias"),
    rope=Rope(partial=0.5),
    recurrent=MAMBA,
    kv_heads_may_be_missing=True,
    stored=StoredTensors(
        renamed=(
            (".mamba.", ".linear_attn."),
            (".feed_forward.", ".mlp."),
            (".pre_ff_layernorm.", ".post_attention_layernorm."),
            ("model.final_layernorm.", "model.norm."),
        ),
        fused=_MAMBA_PARTS,
    ),
)
"""Layers with Mamba-2; a few have attention."""

_GRANITE_NAMES = (
    (".mamba.", ".linear_attn."),
    (".block_sparse_moe.router.layer.", ".mlp.gate."),
    (".block_sparse_moe.router.", ".mlp.gate."),
    (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
)

_GRANITE_WITH_EXPERTS = Architecture(
    "granitemoehybrid",
    "Granite 4",
    "GraniteMoeHybridForCausalLM",
    gguf=replace(_GRANITE_GGUF, layer_tensors=_MAMBA_TENSORS | EXPERT_TENSORS),
    attention_bias=BY_ATTENTION_BIAS,
    output_bias=BY_ATTENTION_BIAS,
    scales=GRANITE.scales,
    rope=Rope(by_type=True),
    experts=ExpertKeys(
        ("num_local_experts",),
        size="intermediate_size",
        normalize=ALWAYS,
        shared_size="shared_intermediate_size",
    ),
    recurrent=MAMBA,
    kv_heads_may_be_missing=True,
    stored=StoredTensors(
        renamed=(*_GRANITE_NAMES, (".shared_mlp.", ".mlp.shared_experts.")),
        fused={
            **_MAMBA_PARTS,
            "mlp.shared_experts.input_linear": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
            "mlp.shared_experts.output_linear": ("mlp.shared_experts.down_proj",),
        },
        stacked_experts=ExpertStacks.HALVES,
    ),
)

GRANITE_HYBRID = replace(
    _GRANITE_WITH_EXPERTS,
    without_experts=replace(
        _GRANITE_WITH_EXPERTS,
        gguf=replace(_GRANITE_GGUF, marked_by="attention.scale"),
        experts=None,
        mlp_size="shared_intermediate_size",
        stored=StoredTensors(
            renamed=(*_GRANITE_NAMES, (".shared_mlp.", ".mlp.")),
            fused={
                **_MAMBA_PARTS,
                "mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj"),
                "mlp.output_linear": ("mlp.down_proj",),
            },
        ),
    ),
)
"""Layers with Mamba-2; a few have attention. All have routed experts and a shared one, or an MLP."""

_NEMOTRON_GGUF = GgufNames(
    "nemotron_h",
    _MAMBA_TENSORS,
    interleaved=True,
    fused=_MAMBA_GGUF_PARTS,
    settings={"position_embedding_type": "nope"},
)

_NEMOTRON_WITH_EXPERTS = Architecture(
    "nemotron_h",
    "Nemotron-H, Nemotron 3 Nano",
    "NemotronHForCausalLM",
    gguf=replace(
        _NEMOTRON_GGUF, architecture="nemotron_h_moe", layer_tensors=_MAMBA_TENSORS | EXPERT_TENSORS
    ),
    mlp_bias=ConfigSwitch(key="mlp_bias"),
    norms=Norms.SINGLE,
    rope=Rope(by_type=True),
    experts=replace(
        SIGMOID_EXPERTS,
        shared_count=None,
        shared_size="moe_shared_expert_intermediate_size",
        dense=DenseLayers.NONE,
    ),
    recurrent=replace(
        MAMBA,
        kernel="conv_kernel",
        heads="mamba_num_heads",
        value_dim="mamba_head_dim",
        key_heads="n_groups",
        key_dim="ssm_state_size",
        conv_bias="use_conv_bias",
        bias="use_bias",
        attention_layers=None,
        grouped_norm=True,
    ),
    kv_heads_may_be_missing=True,
    activation_key="mlp_hidden_act",
    activation="relu2",
    ungated_mlp=True,
    norm_eps="layer_norm_epsilon",
    stored=StoredTensors(
        renamed=(
            ("backbone.", "model."),
            ("model.embeddings.", "model.embed_tokens."),
            ("model.norm_f.", "model.norm."),
            (".norm.weight", ".input_layernorm.weight"),
            ("model.input_layernorm.", "model.norm."),
            (".mixer.input_layernorm.", ".linear_attn.norm."),
            *((f".mixer.{name}_proj.", f".self_attn.{name}_proj.") for name in "qkvo"),
            *(
                (f".mixer.{name}.", f".mlp.{name}.")
                for name in ("up_proj", "down_proj", "gate", "experts", "shared_experts")
            ),
            (".mixer.", ".linear_attn."),
        ),
        fused=_MAMBA_PARTS,
    ),
)

NEMOTRON_H = replace(
    _NEMOTRON_WITH_EXPERTS,
    without_experts=replace(_NEMOTRON_WITH_EXPERTS, gguf=_NEMOTRON_GGUF, experts=None),
)
"""Each layer has one of: Mamba-2, attention, an MLP, experts."""

_LFM2_TENSORS = {
    "shortconv.conv": "linear_attn.conv1d",
    "shortconv.in_proj": "linear_attn.in_proj",
    "shortconv.out_proj": "linear_attn.out_proj",
}

LFM2 = Architecture(
    "lfm2",
    "LFM2",
    "Lfm2ForCausalLM",
    gguf=GgufNames(
        "lfm2", LLAMA_TENSORS | QK_NORM_TENSORS | _LFM2_TENSORS, settings={"block_auto_adjust_ff_dim": False}
    ),
    qk_norm=ALWAYS,
    rope=Rope(theta=1e6),
    recurrent=RecurrentKeys(
        kind=Recurrence.NONE,
        kernel="conv_L_cache",
        conv_bias="conv_bias",
        bias="conv_bias",
        attention_layers="full_attn_idxs",
    ),
    norm_eps="norm_eps",
    adjusted_mlp=True,
    stored=StoredTensors(
        renamed=(
            (".operator_norm.", ".input_layernorm."),
            (".ffn_norm.", ".post_attention_layernorm."),
            ("model.embedding_norm.", "model.norm."),
            (".feed_forward.w1.", ".mlp.gate_proj."),
            (".feed_forward.w3.", ".mlp.up_proj."),
            (".feed_forward.w2.", ".mlp.down_proj."),
            (".self_attn.out_proj.", ".self_attn.o_proj."),
            (".q_layernorm.", ".q_norm."),
            (".k_layernorm.", ".k_norm."),
            (".conv.conv.", ".linear_attn.conv1d."),
            (".conv.", ".linear_attn."),
        )
    ),
)
"""Layers with a short convolution; a few have attention."""

HYBRIDS = (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, GRANITE_HYBRID, BAMBA, NEMOTRON_H, LFM2)
