"""Phi-3, Phi-3.5 and Phi-4: projections of one input stored as one matrix, LongRoPE."""

from foreword.models.architectures.architecture import (
    LLAMA_TENSORS,
    Architecture,
    GgufNames,
    Rope,
    StoredTensors,
    Window,
    WindowedLayers,
)

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
    window=Window(WindowedLayers.ALL, listed=False),
    rope=Rope(yarn_is_longrope=True),
    kv_heads_may_be_missing=True,
    stored=StoredTensors(
        fused={
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        }
    ),
)
