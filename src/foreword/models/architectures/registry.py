"""All families, by the names that files have for them."""

from foreword.models.architectures.architecture import Architecture
from foreword.models.architectures.dense.gemma2 import GEMMA2
from foreword.models.architectures.dense.gemma3 import GEMMA3
from foreword.models.architectures.dense.granite import GRANITE
from foreword.models.architectures.dense.llama import LLAMA
from foreword.models.architectures.dense.mimo import MIMO
from foreword.models.architectures.dense.mistral import MISTRAL
from foreword.models.architectures.dense.olmo2 import OLMO2
from foreword.models.architectures.dense.phi3 import PHI3
from foreword.models.architectures.dense.qwen2 import QWEN2
from foreword.models.architectures.dense.qwen3 import QWEN3
from foreword.models.architectures.dense.smollm3 import SMOLLM3
from foreword.models.architectures.mixtures.deepseek_v2 import DEEPSEEK_V2
from foreword.models.architectures.mixtures.deepseek_v3 import DEEPSEEK_V3
from foreword.models.architectures.mixtures.glm4_moe import GLM4_MOE
from foreword.models.architectures.mixtures.mixtral import MIXTRAL
from foreword.models.architectures.mixtures.qwen2_moe import QWEN2_MOE
from foreword.models.architectures.mixtures.qwen3_moe import QWEN3_MOE
from foreword.models.config import Scores

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

GGUF_NAMES = tuple(
    dict.fromkeys(family.gguf.architecture for family in ARCHITECTURES if family.gguf is not None)
)


def gguf_family_named(name: str, scores: Scores | None) -> Architecture | None:
    """By general.architecture and how a router scores experts, None without any.

    Mixtral is a llama with experts, and DeepSeek-V3 a V2 whose router scores otherwise.
    """
    for family in ARCHITECTURES:
        own = None if family.experts is None else family.experts.scores
        if family.gguf is not None and (family.gguf.architecture, own) == (name, scores):
            return family
    return None
