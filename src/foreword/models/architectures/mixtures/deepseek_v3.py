"""DeepSeek-V3 and R1: V2 with sigmoid scores and a correction for the choice of experts."""

from dataclasses import replace

from foreword.models.architectures.mixtures.deepseek_v2 import DEEPSEEK_V2
from foreword.models.architectures.mixtures.glm4_moe import GLM4_MOE

DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    name="deepseek_v3",
    models="DeepSeek-V3, R1",
    hf_class="DeepseekV3ForCausalLM",
    experts=GLM4_MOE.experts,
)
