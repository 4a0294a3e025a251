"""Qwen3-MoE: Qwen3 with experts."""

from foreword.models.architectures.architecture import (
    EXPERT_TENSORS,
    LLAMA_TENSORS,
    QK_NORM_TENSORS,
    Architecture,
    GgufNames,
    Window,
    WindowedLayers,
)
from foreword.models.architectures.experts import DenseLayers, ExpertKeys
from foreword.models.architectures.switch import Switch

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
    attention_bias=Switch(key="attention_bias"),
    output_bias=Switch(key="attention_bias"),
    qk_norm=Switch(always=True),
    window=Window(WindowedLayers.ALL, switch="use_sliding_window", listed=False),
    experts=ExpertKeys(
        count=("num_experts", "num_local_experts"),
        normalize=Switch(key="norm_topk_prob"),
        dense=DenseLayers.BY_STEP,
    ),
)
