"""Qwen2 and Qwen2.5: biases on q, k and v."""

from foreword.models.architectures.architecture import LLAMA_TENSORS, QWEN_WINDOW, Architecture, GgufNames
from foreword.models.architectures.switch import Switch

QWEN2 = Architecture(
    name="qwen2",
    models="Qwen2, Qwen2.5",
    hf_class="Qwen2ForCausalLM",
    gguf=GgufNames("qwen2", interleaved=False, layer_tensors=LLAMA_TENSORS),
    attention_bias=Switch(always=True),
    window=QWEN_WINDOW,
)
