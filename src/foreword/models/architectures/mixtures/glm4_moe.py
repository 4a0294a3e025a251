"""GLM-4.5: half of a head turns; experts by sigmoid scores with a correction, beside a shared one."""

from foreword.models.architectures.architecture import (
    EXPERT_TENSORS,
    LLAMA_TENSORS,
    QK_NORM_TENSORS,
    Architecture,
    GgufNames,
    Rope,
)
from foreword.models.architectures.experts import DenseLayers, ExpertKeys, Grouping
from foreword.models.architectures.switch import Switch
from foreword.models.config import GroupScore, Scores

GLM4_MOE = Architecture(
    name="glm4_moe",
    models="GLM-4.5",
    hf_class="Glm4MoeForCausalLM",
    gguf=GgufNames(
        "glm4moe",
        interleaved=False,
        layer_tensors=LLAMA_TENSORS
        | QK_NORM_TENSORS
        | EXPERT_TENSORS
        | {"post_attention_norm": "post_attention_layernorm"},
        settings={"norm_topk_prob": False},
    ),
    attention_bias=Switch(key="attention_bias"),
    qk_norm=Switch(key="use_qk_norm"),
    rope=Rope(partial=0.5),
    experts=ExpertKeys(
        count=("n_routed_experts",),
        scores=Scores.SIGMOID,
        normalize=Switch(key="norm_topk_prob", default=True),
        corrected=True,
        scale="routed_scaling_factor",
        grouping=Grouping.ALWAYS,
        group_score=GroupScore.TOP2,
        shared_count="n_shared_experts",
        dense=DenseLayers.FIRST,
    ),
)
