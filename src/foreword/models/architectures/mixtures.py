"""Families with mixtures of experts."""

from dataclasses import replace

from foreword.models.architectures.architecture import (
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

MIXTRAL = Architecture(
    name="mixtral",
    models="Mixtral",
    hf_class="MixtralForCausalLM",
    gguf=GgufNames("llama", interleaved=True, layer_tensors=LLAMA_TENSORS | EXPERT_TENSORS, settings={}),
    window=WindowField(WindowedLayers.ALL, listed=False),
    rope=Rope(theta=1e6),
    experts=ExpertKeys(
        count=("num_local_experts",), size="intermediate_size", normalize=ConfigSwitch(always=True)
    ),
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
    count=("num_experts", "num_local_experts"),
    normalize=ConfigSwitch(key="norm_topk_prob"),
    shared_size="shared_expert_intermediate_size",
    shared_gate=True,
    dense=DenseLayers.BY_STEP,
)

QWEN2_MOE = Architecture(
    name="qwen2_moe",
    models="Qwen1.5-MoE, Qwen2-MoE",
    hf_class="Qwen2MoeForCausalLM",
    gguf=GgufNames("qwen2moe", interleaved=False, layer_tensors=LLAMA_TENSORS | EXPERT_TENSORS, settings={}),
    attention_bias=ConfigSwitch(key="qkv_bias", default=True),
    window=QWEN_WINDOW,
    experts=GATED_EXPERTS,
    stored=StoredTensors(renamed=((".shared_expert.", ".shared_experts."),)),
)
"""Qwen2 with experts, and a shared expert weighed by a gate."""

QWEN3_MOE = Architecture(
    name="qwen3_moe",
    models="Qwen3-MoE",
    hf_class="Qwen3MoeForCausalLM",
    gguf=GgufNames(
        "qwen3moe",
        interleaved=False,
        layer_tensors=LLAMA_TENSORS | QK_NORM_TENSORS | EXPERT_TENSORS,
        settings={"norm_topk_prob": True},
    ),
    attention_bias=ConfigSwitch(key="attention_bias"),
    output_bias=ConfigSwitch(key="attention_bias"),
    qk_norm=ConfigSwitch(always=True),
    window=WindowField(WindowedLayers.ALL, switch="use_sliding_window", listed=False),
    experts=ExpertKeys(
        count=("num_experts", "num_local_experts"),
        normalize=ConfigSwitch(key="norm_topk_prob"),
        dense=DenseLayers.BY_STEP,
    ),
)
"""Qwen3 with experts."""

GPT_OSS = Architecture(
    name="gpt_oss",
    models="gpt-oss",
    hf_class="GptOssForCausalLM",
    gguf=GgufNames(
        "gpt-oss",
        interleaved=False,
        layer_tensors=LLAMA_TENSORS
        | EXPERT_TENSORS
        | {"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"},
        settings={"swiglu_limit": 7.0},
    ),
    attention_bias=ConfigSwitch(key="attention_bias", default=True),
    output_bias=ConfigSwitch(key="attention_bias", default=True),
    window=WindowField(WindowedLayers.ALL_BUT_EVERY_NTH, period=2),
    rope=Rope(theta=150_000.0, yarn_truncates=False),
    experts=ExpertKeys(
        count=("num_local_experts",),
        size="intermediate_size",
        normalize=ConfigSwitch(always=True),
        bias=True,
        clamp="swiglu_limit",
    ),
    has_sinks=True,
    stored=StoredTensors(renamed=((".mlp.router.", ".mlp.gate."),), stacked_experts=ExpertStacks.INTERLEAVED),
)
"""Sinks, alternating windows, experts with biases whose gates are clamped."""

GLM4_MOE = Architecture(
    name="glm4_moe",
    models="GLM-4.5",
    hf_class="Glm4MoeForCausalLM",
    gguf=GgufNames(
        "glm4moe",
        interleaved=False,
        layer_tensors=LLAMA_TENSORS
        | QK_NORM_TENSORS
        | EXPERT_TENSORS
        | {"post_attention_norm": "post_attention_layernorm"},
        settings={"norm_topk_prob": False},
    ),
    attention_bias=ConfigSwitch(key="attention_bias"),
    qk_norm=ConfigSwitch(key="use_qk_norm"),
    rope=Rope(partial=0.5),
    experts=ExpertKeys(
        count=("n_routed_experts",),
        scores=Scores.SIGMOID,
        normalize=ConfigSwitch(key="norm_topk_prob", default=True),
        corrected=True,
        scale="routed_scaling_factor",
        grouping=Grouping.ALWAYS,
        group_score=GroupScore.TOP2,
        shared_count="n_shared_experts",
        dense=DenseLayers.FIRST,
    ),
)
"""Half of a head is rotated; experts by sigmoid scores with a correction, beside a shared expert."""

DEEPSEEK_V2 = Architecture(
    name="deepseek_v2",
    models="DeepSeek-V2",
    hf_class="DeepseekV2ForCausalLM",
    gguf=GgufNames(
        "deepseek2",
        interleaved=True,
        layer_tensors=LATENT_TENSORS | EXPERT_TENSORS,
        settings={"norm_topk_prob": False},
    ),
    attention_bias=ConfigSwitch(key="attention_bias"),
    output_bias=ConfigSwitch(key="attention_bias"),
    rope=Rope(interleaved=True),
    experts=ExpertKeys(
        count=("n_routed_experts",),
        scale="routed_scaling_factor",
        grouping=Grouping.BY_METHOD,
        shared_count="n_shared_experts",
        dense=DenseLayers.FIRST,
    ),
    is_latent=True,
    kv_heads_may_be_missing=True,
)
"""Latent attention, shared experts, experts chosen in groups."""

DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    name="deepseek_v3",
    models="DeepSeek-V3, R1",
    hf_class="DeepseekV3ForCausalLM",
    experts=GLM4_MOE.experts,
)
"""V2 with sigmoid scores and a correction for the choice of experts."""
