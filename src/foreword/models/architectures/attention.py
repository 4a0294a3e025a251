"""Model families whose layers all have attention: dense ones, then mixtures of experts."""

from dataclasses import replace

from foreword.models.architectures.architecture import (
    ALWAYS,
    AROUND_TENSORS,
    BY_ATTENTION_BIAS,
    BY_NORM_TOPK,
    EXPERT_TENSORS,
    LATENT_TENSORS,
    LLAMA_TENSORS,
    NEVER,
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
    Scales,
    StoredTensors,
    WindowedLayers,
    WindowField,
)
from foreword.models.config import GroupScore, Norms, Scores

LLAMA = Architecture(
    "llama",
    "Llama, SmolLM, SmolLM2",
    "LlamaForCausalLM",
    gguf=GgufNames("llama", interleaved=True, windows_everywhere=True),
    attention_bias=BY_ATTENTION_BIAS,
    output_bias=BY_ATTENTION_BIAS,
    mlp_bias=ConfigSwitch(key="mlp_bias"),
    kv_heads_may_be_missing=True,
)
"""Llama, and all models that use its class."""

MISTRAL = Architecture(
    "mistral",
    "Mistral",
    "MistralForCausalLM",
    gguf_alias="llama",
    window=WindowField(WindowedLayers.ALL, listed=False),
)
"""Llama without biases; the first versions have a sliding window. Its GGUF files name the architecture llama."""

QWEN2 = Architecture(
    "qwen2",
    "Qwen2, Qwen2.5",
    "Qwen2ForCausalLM",
    gguf=GgufNames("qwen2", windows_everywhere=True),
    attention_bias=ALWAYS,
    window=QWEN_WINDOW,
)
"""Llama with biases of the q, k and v projections."""

QWEN3 = Architecture(
    "qwen3",
    "Qwen3",
    "Qwen3ForCausalLM",
    gguf=GgufNames("qwen3", LLAMA_TENSORS | QK_NORM_TENSORS, windows_everywhere=True),
    attention_bias=BY_ATTENTION_BIAS,
    output_bias=BY_ATTENTION_BIAS,
    qk_norm=ALWAYS,
    window=QWEN_WINDOW,
)
"""Llama with a norm of every query and key head."""

MIMO = Architecture("mimo", "MiMo-7B", "MiMoForCausalLM", attention_bias=ALWAYS, window=QWEN_WINDOW)
"""Qwen2 with MTP modules."""

GEMMA2 = Architecture(
    "gemma2",
    "Gemma 2",
    "Gemma2ForCausalLM",
    gguf=GgufNames("gemma2", AROUND_TENSORS, deep=46),
    attention_bias=BY_ATTENTION_BIAS,
    output_bias=BY_ATTENTION_BIAS,
    norms=Norms.AROUND,
    window=WindowField(WindowedLayers.ALL_BUT_EVERY_NTH, period=2),
    scales=Scales(
        embedding_by_width=True,
        attention_root="query_pre_attn_scalar",
        attention_cap="attn_logit_softcapping",
        logits_cap="final_logit_softcapping",
    ),
    activation_key="hidden_activation",
    activation="gelu_pytorch_tanh",
    stored=StoredTensors(norms_minus_one=True),
)
"""Norms before and after attention and MLP, GeGLU, soft caps, scaled embeddings; every other layer has a window."""

GEMMA3 = replace(
    GEMMA2,
    name="gemma3",
    models="Gemma 3 (text)",
    hf_class="Gemma3ForCausalLM",
    gguf=GgufNames("gemma3", AROUND_TENSORS | QK_NORM_TENSORS, deep=62),
    qk_norm=ALWAYS,
    window=WindowField(WindowedLayers.ALL_BUT_EVERY_NTH, period=6, period_key="sliding_window_pattern"),
    rope=Rope(theta=1e6, local_theta=1e4),
)
"""Gemma 2 with norms of query and key heads; layers with a window have other rotary frequencies than the rest."""

PHI3 = Architecture(
    "phi3",
    "Phi-3, Phi-3.5, Phi-4",
    "Phi3ForCausalLM",
    gguf=GgufNames(
        "phi3", fused={"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")}
    ),
    window=WindowField(WindowedLayers.ALL, listed=False),
    rope=Rope(yarn_is_longrope=True),
    kv_heads_may_be_missing=True,
    stored=StoredTensors(
        fused={
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        }
    ),
)
"""Llama with LongRoPE. Projections of the same input are stored as one matrix."""

OLMO2 = replace(
    LLAMA,
    name="olmo2",
    models="OLMo 2",
    hf_class="Olmo2ForCausalLM",
    gguf=GgufNames("olmo2", AROUND_TENSORS | QK_NORM_TENSORS),
    mlp_bias=NEVER,
    qk_norm=ALWAYS,
    wide_qk_norm=True,
    norms=Norms.AFTER,
)
"""Llama with norms after attention and MLP instead of before them, and norms over all query or key heads together."""

GRANITE = replace(
    LLAMA,
    name="granite",
    models="Granite 3",
    hf_class="GraniteForCausalLM",
    gguf=GgufNames("granite", interleaved=True),
    scales=Scales(
        embedding="embedding_multiplier",
        residual="residual_multiplier",
        attention="attention_multiplier",
        logits_divisor="logits_scaling",
    ),
)
"""Llama with factors on embeddings, residuals, attention scores and logits."""

SMOLLM3 = replace(
    LLAMA,
    name="smollm3",
    models="SmolLM3",
    hf_class="SmolLM3ForCausalLM",
    gguf=GgufNames("smollm3", interleaved=True),
    window=WindowField(WindowedLayers.UNROTATED, switch="use_sliding_window"),
    rope=Rope(theta=2e6, unrotated_every=4),
)
"""Llama in which every fourth layer has no rotary embedding."""

DENSE = (LLAMA, MISTRAL, QWEN2, QWEN3, MIMO, GEMMA2, GEMMA3, PHI3, OLMO2, GRANITE, SMOLLM3)

_AFTER_ATTENTION = {"post_attention_norm": "post_attention_layernorm"}

MIXTRAL = replace(
    MISTRAL,
    name="mixtral",
    models="Mixtral",
    hf_class="MixtralForCausalLM",
    gguf=GgufNames("llama", LLAMA_TENSORS | EXPERT_TENSORS, interleaved=True),
    gguf_alias=None,
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

QWEN3_MOE = replace(
    QWEN3,
    name="qwen3_moe",
    models="Qwen3-MoE",
    hf_class="Qwen3MoeForCausalLM",
    gguf=GgufNames(
        "qwen3moe", LLAMA_TENSORS | QK_NORM_TENSORS | EXPERT_TENSORS, settings={"norm_topk_prob": True}
    ),
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
