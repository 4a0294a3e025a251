"""Qwen3: a norm on every query and key head."""

from foreword.models.architectures.architecture import (
    LLAMA_TENSORS,
    QK_NORM_TENSORS,
    QWEN_WINDOW,
    Architecture,
    GgufNames,
)
from foreword.models.architectures.switch import Switch

QWEN3 = Architecture(
    name="qwen3",
    models="Qwen3",
    hf_class="Qwen3ForCausalLM",
    gguf=GgufNames("qwen3", interleaved=False, layer_tensors=LLAMA_TENSORS | QK_NORM_TENSORS),
    attention_bias=Switch(key="attention_bias"),
    output_bias=Switch(key="attention_bias"),
    qk_norm=Switch(always=True),
    window=QWEN_WINDOW,
)
