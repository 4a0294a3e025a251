"""DeepSeek-V2: latent attention, shared experts, experts chosen in groups."""

from foreword.models.architectures.architecture import (
    EXPERT_TENSORS,
    LATENT_TENSORS,
    Architecture,
    GgufNames,
    Rope,
)
from foreword.models.architectures.experts import DenseLayers, ExpertKeys, Grouping
from foreword.models.architectures.switch import Switch

DEEPSEEK_V2 = Architecture(
    name="deepseek_v2",
    models="DeepSeek-V2",
    hf_class="DeepseekV2ForCausalLM",
    gguf=GgufNames(
        "deepseek2",
        interleaved=True,
        layer_tensors=LATENT_TENSORS | EXPERT_TENSORS,
        settings={"norm_topk_prob": False},
    ),
    attention_bias=Switch(key="attention_bias"),
    output_bias=Switch(key="attention_bias"),
    rope=Rope(interleaved=True),
    experts=ExpertKeys(
        count=("n_routed_experts",),
        scale="routed_scaling_factor",
        grouping=Grouping.BY_METHOD,
        shared_count="n_shared_experts",
        dense=DenseLayers.FIRST,
    ),
    is_latent=True,
    kv_heads_may_be_missing=True,
)
