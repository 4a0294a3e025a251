"""Families without mixtures of experts."""

from dataclasses import replace

from foreword.models.architectures.architecture import (
    AROUND_TENSORS,
    LLAMA_TENSORS,
    QK_NORM_TENSORS,
    QWEN_WINDOW,
    Architecture,
    ConfigSwitch,
    GgufNames,
    Rope,
    Scales,
    StoredTensors,
    WindowedLayers,
    WindowField,
)
from foreword.models.config import Norms

LLAMA = Architecture(
    name="llama",
    models="Llama, SmolLM, SmolLM2",
    hf_class="LlamaForCausalLM",
    gguf=GgufNames("llama", interleaved=True, layer_tensors=LLAMA_TENSORS),
    attention_bias=ConfigSwitch(key="attention_bias"),
    output_bias=ConfigSwitch(key="attention_bias"),
    mlp_bias=ConfigSwitch(key="mlp_bias"),
    kv_heads_may_be_missing=True,
)
"""Llama, SmolLM and all that use their class."""

MISTRAL = Architecture(
    name="mistral",
    models="Mistral",
    hf_class="MistralForCausalLM",
    gguf_alias="llama",
    window=WindowField(WindowedLayers.ALL, listed=False),
)
"""Llama without biases, in its first versions with a sliding window. GGUF files call it llama."""

QWEN2 = Architecture(
    name="qwen2",
    models="Qwen2, Qwen2.5",
    hf_class="Qwen2ForCausalLM",
    gguf=GgufNames("qwen2", interleaved=False, layer_tensors=LLAMA_TENSORS),
    attention_bias=ConfigSwitch(always=True),
    window=QWEN_WINDOW,
)
"""Biases on q, k and v."""

QWEN3 = Architecture(
    name="qwen3",
    models="Qwen3",
    hf_class="Qwen3ForCausalLM",
    gguf=GgufNames("qwen3", interleaved=False, layer_tensors=LLAMA_TENSORS | QK_NORM_TENSORS),
    attention_bias=ConfigSwitch(key="attention_bias"),
    output_bias=ConfigSwitch(key="attention_bias"),
    qk_norm=ConfigSwitch(always=True),
    window=QWEN_WINDOW,
)
"""A norm on every query and key head."""

MIMO = Architecture(
    name="mimo",
    models="MiMo-7B",
    hf_class="MiMoForCausalLM",
    attention_bias=ConfigSwitch(always=True),
    window=QWEN_WINDOW,
)
"""Qwen2 with MTP modules beside its layers."""

GEMMA2 = Architecture(
    name="gemma2",
    models="Gemma 2",
    hf_class="Gemma2ForCausalLM",
    gguf=GgufNames("gemma2", interleaved=False, layer_tensors=AROUND_TENSORS, settings={}, deep=46),
    attention_bias=ConfigSwitch(key="attention_bias"),
    output_bias=ConfigSwitch(key="attention_bias"),
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
"""Norms around attention and MLP, GeGLU, soft caps, scaled embeddings; every other layer has a window."""

GEMMA3 = replace(
    GEMMA2,
    name="gemma3",
    models="Gemma 3 (text)",
    hf_class="Gemma3ForCausalLM",
    gguf=GgufNames(
        "gemma3",
        interleaved=False,
        layer_tensors=AROUND_TENSORS | QK_NORM_TENSORS,
        settings={},
        deep=62,
    ),
    qk_norm=ConfigSwitch(always=True),
    window=WindowField(WindowedLayers.ALL_BUT_EVERY_NTH, period=6, period_key="sliding_window_pattern"),
    rope=Rope(theta=1e6, local_theta=1e4),
)
"""Gemma 2 with norms on heads; windowed layers have rotary frequencies of their own."""

PHI3 = Architecture(
    name="phi3",
    models="Phi-3, Phi-3.5, Phi-4",
    hf_class="Phi3ForCausalLM",
    gguf=GgufNames(
        "phi3",
        interleaved=False,
        layer_tensors=LLAMA_TENSORS,
        fused={"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")},
        settings={},
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
"""Projections of one input stored as one matrix, LongRoPE."""

OLMO2 = Architecture(
    name="olmo2",
    models="OLMo 2",
    hf_class="Olmo2ForCausalLM",
    gguf=GgufNames("olmo2", interleaved=False, layer_tensors=AROUND_TENSORS | QK_NORM_TENSORS, settings={}),
    attention_bias=ConfigSwitch(key="attention_bias"),
    output_bias=ConfigSwitch(key="attention_bias"),
    qk_norm=ConfigSwitch(always=True),
    wide_qk_norm=True,
    norms=Norms.AFTER,
    kv_heads_may_be_missing=True,
)
"""Norms after attention and MLP instead of before them, and over all query and key heads together."""

GRANITE = Architecture(
    name="granite",
    models="Granite 3",
    hf_class="GraniteForCausalLM",
    gguf=GgufNames("granite", interleaved=True, layer_tensors=LLAMA_TENSORS, settings={}),
    attention_bias=ConfigSwitch(key="attention_bias"),
    output_bias=ConfigSwitch(key="attention_bias"),
    mlp_bias=ConfigSwitch(key="mlp_bias"),
    scales=Scales(
        embedding="embedding_multiplier",
        residual="residual_multiplier",
        attention="attention_multiplier",
        logits_divisor="logits_scaling",
    ),
    kv_heads_may_be_missing=True,
)
"""Llama with factors on embeddings, residuals, attention scores and logits."""

SMOLLM3 = Architecture(
    name="smollm3",
    models="SmolLM3",
    hf_class="SmolLM3ForCausalLM",
    gguf=GgufNames("smollm3", interleaved=True, layer_tensors=LLAMA_TENSORS, settings={}),
    attention_bias=ConfigSwitch(key="attention_bias"),
    output_bias=ConfigSwitch(key="attention_bias"),
    mlp_bias=ConfigSwitch(key="mlp_bias"),
    window=WindowField(WindowedLayers.UNROTATED, switch="use_sliding_window"),
    rope=Rope(theta=2e6, unrotated_every=4),
    kv_heads_may_be_missing=True,
)
"""Llama in which every fourth layer has no rotary embedding."""
