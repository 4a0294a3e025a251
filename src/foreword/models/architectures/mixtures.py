"""Model families with mixtures of experts."""

from dataclasses import replace

from foreword.models.architectures.architecture import (
    ALWAYS,
    BY_ATTENTION_BIAS,
    BY_NORM_TOPK,
    EXPERT_TENSORS,
    LATENT_TENSORS,
    LLAMA_TENSORS,
    QK_NORM_TENSORS,
    QWEN_WINDOW,
    Architecture,
    ConfigSwitch,
    DenseLayers,
    ExpertKeys,
    ExpertStacks,
    GgufNames,
    Grouping,
    Rope,
    StoredTensors,
    WindowedLayers,
    WindowField,
)
from foreword.models.config import GroupScore, Scores

_AFTER_ATTENTION = {"post_attention_norm": "post_attention_layernorm"}

MIXTRAL = Architecture(
    "mixtral",
    "Mixtral",
    "MixtralForCausalLM",
    gguf=GgufNames("llama", LLAMA_TENSORS | EXPERT_TENSORS, interleaved=True),
    window=WindowField(WindowedLayers.ALL, listed=False),
    rope=Rope(theta=1e6),
    experts=ExpertKeys(("num_local_experts",), size="intermediate_size", normalize=ALWAYS),
    kv_heads_may_be_missing=True,
    stored=StoredTensors(
        renamed=(
            (".block_sparse_moe.", ".mlp."),
            (".w1.", ".gate_proj."),
            (".w3.", ".up_proj."),
            (".w2.", ".down_proj."),
        )
    ),
)
"""Mistral with experts."""

GATED_EXPERTS = ExpertKeys(
    ("num_experts", "num_local_experts"),
    normalize=ConfigSwitch(key="norm_topk_prob"),
    shared_size="shared_expert_intermediate_size",
    shared_gate=True,
    dense=DenseLayers.BY_STEP,
)

SIGMOID_EXPERTS = ExpertKeys(
    ("n_routed_experts",),
    scores=Scores.SIGMOID,
    normalize=BY_NORM_TOPK,
    corrected=True,
    scale="routed_scaling_factor",
    grouping=Grouping.ALWAYS,
    group_score=GroupScore.TOP2,
    shared_count="n_shared_experts",
    dense=DenseLayers.FIRST,
)

QWEN2_MOE = Architecture(
    "qwen2_moe",
    "Qwen1.5-MoE, Qwen2-MoE",
    "Qwen2MoeForCausalLM",
    gguf=GgufNames("qwen2moe", LLAMA_TENSORS | EXPERT_TENSORS),
    attention_bias=ConfigSwitch(key="qkv_bias", default=True),
    window=QWEN_WINDOW,
    experts=GATED_EXPERTS,
    stored=StoredTensors(renamed=((".shared_expert.", ".shared_experts."),)),
)
"""Qwen2 with experts, and a shared expert whose output is multiplied by a gate."""

QWEN3_MOE = Architecture(
    "qwen3_moe",
    "Qwen3-MoE",
    "Qwen3MoeForCausalLM",
    gguf=GgufNames(
        "qwen3moe", LLAMA_TENSORS | QK_NORM_TENSORS | EXPERT_TENSORS, settings={"norm_topk_prob": True}
    ),
    attention_bias=BY_ATTENTION_BIAS,
    output_bias=BY_ATTENTION_BIAS,
    qk_norm=ALWAYS,
    window=WindowField(WindowedLayers.ALL, switch="use_sliding_window", listed=False),
    experts=replace(GATED_EXPERTS, shared_size=None, shared_gate=False),
)
"""Qwen3 with experts."""

GLM4_MOE = Architecture(
    "glm4_moe",
    "GLM-4.5",
    "Glm4MoeForCausalLM",
    gguf=GgufNames(
        "glm4moe",
        LLAMA_TENSORS | QK_NORM_TENSORS | EXPERT_TENSORS | _AFTER_ATTENTION,
        settings={"norm_topk_prob": False},
    ),
    attention_bias=BY_ATTENTION_BIAS,
    qk_norm=ConfigSwitch(key="use_qk_norm"),
    rope=Rope(partial=0.5),
    experts=SIGMOID_EXPERTS,
)
"""Half of a head is rotated. Experts are selected by corrected sigmoid scores; there is a shared expert."""

DEEPSEEK_V2 = Architecture(
    "deepseek_v2",
    "DeepSeek-V2",
    "DeepseekV2ForCausalLM",
    gguf=GgufNames(
        "deepseek2", LATENT_TENSORS | EXPERT_TENSORS, interleaved=True, settings={"norm_topk_prob": False}
    ),
    attention_bias=BY_ATTENTION_BIAS,
    output_bias=BY_ATTENTION_BIAS,
    rope=Rope(interleaved=True),
    experts=ExpertKeys(
        ("n_routed_experts",),
        scale="routed_scaling_factor",
        grouping=Grouping.BY_METHOD,
        shared_count="n_shared_experts",
        dense=DenseLayers.FIRST,
    ),
    is_latent=True,
    kv_heads_may_be_missing=True,
)
"""Latent attention, a shared expert, and experts that are selected within groups."""

DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    name="deepseek_v3",
    models="DeepSeek-V3, R1",
    hf_class="DeepseekV3ForCausalLM",
    experts=SIGMOID_EXPERTS,
)
"""DeepSeek-V2 with experts that are selected by corrected sigmoid scores."""

GPT_OSS = Architecture(
    "gpt_oss",
    "gpt-oss",
    "GptOssForCausalLM",
    gguf=GgufNames(
        "gpt-oss",
        LLAMA_TENSORS | EXPERT_TENSORS | _AFTER_ATTENTION | {"attn_sinks": "self_attn.sinks"},
    ),
    attention_bias=ConfigSwitch(key="attention_bias", default=True),
    output_bias=ConfigSwitch(key="attention_bias", default=True),
    window=WindowField(WindowedLayers.ALL_BUT_EVERY_NTH, period=2),
    rope=Rope(theta=150_000.0, yarn_truncates=False),
    experts=ExpertKeys(
        ("num_local_experts",),
        size="intermediate_size",
        normalize=ALWAYS,
        bias=True,
        clamp=("swiglu_limit", 7.0),
    ),
    has_sinks=True,
    stored=StoredTensors(renamed=((".mlp.router.", ".mlp.gate."),), stacked_experts=ExpertStacks.INTERLEAVED),
)
"""Attention sinks, a window in every other layer, and clamped experts with biases."""

MIXTURES = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, GLM4_MOE, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS)
