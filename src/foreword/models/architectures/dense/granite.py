"""Granite: Llama with factors on embeddings, residuals, attention scores and logits."""

from foreword.models.architectures.architecture import LLAMA_TENSORS, Architecture, GgufNames, Scales
from foreword.models.architectures.switch import Switch

GRANITE = Architecture(
    name="granite",
    models="Granite 3",
    hf_class="GraniteForCausalLM",
    gguf=GgufNames("granite", interleaved=True, layer_tensors=LLAMA_TENSORS, settings={}),
    attention_bias=Switch(key="attention_bias"),
    output_bias=Switch(key="attention_bias"),
    mlp_bias=Switch(key="mlp_bias"),
    scales=Scales(
        embedding="embedding_multiplier",
        residual="residual_multiplier",
        attention="attention_multiplier",
        logits_divisor="logits_scaling",
    ),
    kv_heads_may_be_missing=True,
)
