"""Families with recurrent layers."""

from dataclasses import replace

from foreword.models.architectures.architecture import (
    LLAMA_TENSORS,
    QK_NORM_TENSORS,
    Architecture,
    ConfigSwitch,
    ExpertKeys,
    ExpertStacks,
    GgufNames,
    Grouping,
    RecurrentKeys,
    Rope,
    Scales,
    StoredTensors,
)
from foreword.models.architectures.mixtures import GATED_EXPERTS
from foreword.models.config import GroupScore, Norms, Recurrence, Scores

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

_TEXT_PART = (("model.language_model.", "model."),)

QWEN3_5 = Architecture(
    name="qwen3_5",
    models="Qwen3.5 (text)",
    hf_class="Qwen3_5ForCausalLM",
    with_images="Qwen3_5ForConditionalGeneration",
    attention_bias=ConfigSwitch(key="attention_bias"),
    output_bias=ConfigSwitch(key="attention_bias"),
    qk_norm=ConfigSwitch(always=True),
    rope=Rope(partial=0.25),
    has_gated_attention=True,
    recurrent=DELTA,
    stored=StoredTensors(renamed=_TEXT_PART, norms_minus_one=True),
)
"""Gated delta rule in three of four layers, gated attention in the others."""

QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe",
    models="Qwen3.5-MoE (text)",
    hf_class="Qwen3_5MoeForCausalLM",
    with_images="Qwen3_5MoeForConditionalGeneration",
    experts=replace(GATED_EXPERTS, normalize=ConfigSwitch(always=True)),
    stored=StoredTensors(
        renamed=(*_TEXT_PART, (".shared_expert.", ".shared_experts.")),
        norms_minus_one=True,
        stacked_experts=ExpertStacks.HALVES,
    ),
)
"""Qwen3.5 with experts, stored as one tensor per layer."""

QWEN3_NEXT = replace(
    QWEN3_5,
    name="qwen3_next",
    models="Qwen3-Next",
    hf_class="Qwen3NextForCausalLM",
    with_images=None,
    experts=replace(GATED_EXPERTS, normalize=ConfigSwitch(key="norm_topk_prob", default=True)),
    stored=StoredTensors(
        renamed=((".shared_expert.", ".shared_experts."),), norms_minus_one=True, grouped_by_key=True
    ),
)
"""Qwen3.5-MoE whose projections are grouped by key head."""

_MAMBA_PARTS = {
    "linear_attn.in_proj": ("linear_attn.in_proj_z", "linear_attn.in_proj_qkv", "linear_attn.in_proj_a")
}

BAMBA = Architecture(
    name="bamba",
    models="Bamba",
    hf_class="BambaForCausalLM",
    attention_bias=ConfigSwitch(key="attention_bias"),
    output_bias=ConfigSwitch(key="attention_bias"),
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
"""Mamba-2, and attention in a few layers."""

_GRANITE_NAMES = (
    (".mamba.", ".linear_attn."),
    (".block_sparse_moe.router.layer.", ".mlp.gate."),
    (".block_sparse_moe.router.", ".mlp.gate."),
    (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
)

_GRANITE_WITH_EXPERTS = Architecture(
    name="granitemoehybrid",
    models="Granite 4",
    hf_class="GraniteMoeHybridForCausalLM",
    attention_bias=ConfigSwitch(key="attention_bias"),
    output_bias=ConfigSwitch(key="attention_bias"),
    scales=Scales(
        embedding="embedding_multiplier",
        residual="residual_multiplier",
        attention="attention_multiplier",
        logits_divisor="logits_scaling",
    ),
    rope=Rope(by_type=True),
    experts=ExpertKeys(
        count=("num_local_experts",),
        size="intermediate_size",
        normalize=ConfigSwitch(always=True),
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
"""Granite with Mamba-2 layers; experts beside a shared one, or one MLP in models without experts."""

NEMOTRON_H = Architecture(
    name="nemotron_h",
    models="Nemotron-H, Nemotron 3 Nano",
    hf_class="NemotronHForCausalLM",
    mlp_bias=ConfigSwitch(key="mlp_bias"),
    norms=Norms.SINGLE,
    rope=Rope(by_type=True),
    experts=ExpertKeys(
        count=("n_routed_experts",),
        scores=Scores.SIGMOID,
        normalize=ConfigSwitch(key="norm_topk_prob", default=True),
        corrected=True,
        scale="routed_scaling_factor",
        grouping=Grouping.ALWAYS,
        group_score=GroupScore.TOP2,
        shared_size="moe_shared_expert_intermediate_size",
    ),
    recurrent=RecurrentKeys(
        kind=Recurrence.SSM,
        kernel="conv_kernel",
        heads="mamba_num_heads",
        value_dim="mamba_head_dim",
        key_heads="n_groups",
        key_dim="ssm_state_size",
        conv_bias="use_conv_bias",
        conv_bias_default=True,
        bias="use_bias",
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
"""Layers of one part each: Mamba-2, attention, an MLP, or experts."""

_LFM2_CONVOLUTION = {"conv": "conv1d", "in_proj": "in_proj", "out_proj": "out_proj"}

LFM2 = Architecture(
    name="lfm2",
    models="LFM2",
    hf_class="Lfm2ForCausalLM",
    gguf=GgufNames(
        "lfm2",
        interleaved=False,
        layer_tensors=LLAMA_TENSORS
        | QK_NORM_TENSORS
        | {f"shortconv.{name}": f"linear_attn.{own}" for name, own in _LFM2_CONVOLUTION.items()},
        settings={"block_auto_adjust_ff_dim": False},
    ),
    qk_norm=ConfigSwitch(always=True),
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
"""Short convolutions, and attention in a few layers."""
