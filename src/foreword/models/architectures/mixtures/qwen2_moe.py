"""Qwen2-MoE (Qwen1.5-MoE too): Qwen2 with experts, and one that all tokens share, weighed by a gate."""

from foreword.models.architectures.architecture import (
    EXPERT_TENSORS,
    LLAMA_TENSORS,
    QWEN_WINDOW,
    Architecture,
    GgufNames,
    StoredTensors,
)
from foreword.models.architectures.experts import DenseLayers, ExpertKeys
from foreword.models.architectures.switch import Switch

GATED_EXPERTS = ExpertKeys(
    count=("num_experts", "num_local_experts"),
    normalize=Switch(key="norm_topk_prob"),
    shared_size="shared_expert_intermediate_size",
    shared_gate=True,
    dense=DenseLayers.BY_STEP,
)

QWEN2_MOE = Architecture(
    name="qwen2_moe",
    models="Qwen1.5-MoE, Qwen2-MoE",
    hf_class="Qwen2MoeForCausalLM",
    gguf=GgufNames("qwen2moe", interleaved=False, layer_tensors=LLAMA_TENSORS | EXPERT_TENSORS, settings={}),
    attention_bias=Switch(key="qkv_bias", default=True),
    window=QWEN_WINDOW,
    experts=GATED_EXPERTS,
    stored=StoredTensors(renamed=((".shared_expert.", ".shared_experts."),)),
)
