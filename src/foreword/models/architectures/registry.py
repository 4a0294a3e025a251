"""All families, by the names that files have for them."""

from foreword.models.architectures.architecture import Architecture
from foreword.models.architectures.deepseek_v2 import DEEPSEEK_V2
from foreword.models.architectures.deepseek_v3 import DEEPSEEK_V3
from foreword.models.architectures.gemma2 import GEMMA2
from foreword.models.architectures.gemma3 import GEMMA3
from foreword.models.architectures.glm4_moe import GLM4_MOE
from foreword.models.architectures.granite import GRANITE
from foreword.models.architectures.llama import LLAMA
from foreword.models.architectures.mimo import MIMO
from foreword.models.architectures.mistral import MISTRAL
from foreword.models.architectures.mixtral import MIXTRAL
from foreword.models.architectures.olmo2 import OLMO2
from foreword.models.architectures.phi3 import PHI3
from foreword.models.architectures.qwen2 import QWEN2
from foreword.models.architectures.qwen2_moe import QWEN2_MOE
from foreword.models.architectures.qwen3 import QWEN3
from foreword.models.architectures.qwen3_moe import QWEN3_MOE
from foreword.models.architectures.smollm3 import SMOLLM3

ARCHITECTURES: tuple[Architecture, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    MIMO,
    GEMMA2,
    GEMMA3,
    PHI3,
    OLMO2,
    GRANITE,
    SMOLLM3,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    GLM4_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
)

BY_HF_CLASS = {family.hf_class: family for family in ARCHITECTURES}

BY_GGUF_NAME = {
    (family.gguf.architecture, family.experts is not None): family
    for family in ARCHITECTURES
    if family.gguf is not None
}
"""By general.architecture and whether there are experts: Mixtral is a llama with experts."""
