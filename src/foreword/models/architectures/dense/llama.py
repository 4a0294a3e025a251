"""Llama, SmolLM and all that use their class."""

from foreword.models.architectures.architecture import LLAMA_TENSORS, Architecture, GgufNames
from foreword.models.architectures.switch import Switch

LLAMA = Architecture(
    name="llama",
    models="Llama, SmolLM, SmolLM2",
    hf_class="LlamaForCausalLM",
    gguf=GgufNames("llama", interleaved=True, layer_tensors=LLAMA_TENSORS),
    attention_bias=Switch(key="attention_bias"),
    output_bias=Switch(key="attention_bias"),
    mlp_bias=Switch(key="mlp_bias"),
    kv_heads_may_be_missing=True,
)
