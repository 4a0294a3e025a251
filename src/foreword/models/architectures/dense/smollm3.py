"""SmolLM3: Llama in which every fourth layer has no rotary embedding."""

from foreword.models.architectures.architecture import (
    LLAMA_TENSORS,
    Architecture,
    GgufNames,
    Rope,
    Window,
    WindowedLayers,
)
from foreword.models.architectures.switch import Switch

SMOLLM3 = Architecture(
    name="smollm3",
    models="SmolLM3",
    hf_class="SmolLM3ForCausalLM",
    gguf=GgufNames("smollm3", interleaved=True, layer_tensors=LLAMA_TENSORS, settings={}),
    attention_bias=Switch(key="attention_bias"),
    output_bias=Switch(key="attention_bias"),
    mlp_bias=Switch(key="mlp_bias"),
    window=Window(WindowedLayers.UNROTATED, switch="use_sliding_window"),
    rope=Rope(theta=2e6, unrotated_every=4),
    kv_heads_may_be_missing=True,
)
