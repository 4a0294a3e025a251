"""All families, by their names in files."""

from foreword.models.architectures.architecture import Architecture
from foreword.models.architectures.dense import (
    GEMMA2,
    GEMMA3,
    GRANITE,
    LLAMA,
    MIMO,
    MISTRAL,
    OLMO2,
    PHI3,
    QWEN2,
    QWEN3,
    SMOLLM3,
)
from foreword.models.architectures.hybrids import (
    BAMBA,
    GRANITE_HYBRID,
    LFM2,
    NEMOTRON_H,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
)
from foreword.models.architectures.mixtures import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE,
    GPT_OSS,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
)
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
    GPT_OSS,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    GRANITE_HYBRID,
    BAMBA,
    NEMOTRON_H,
    LFM2,
)

BY_HF_CLASS = {family.hf_class: family for family in ARCHITECTURES}

GGUF_NAMES = tuple(
    dict.fromkeys(family.gguf.architecture for family in ARCHITECTURES if family.gguf is not None)
)


def gguf_family_named(name: str, scores: Scores | None) -> Architecture | None:
    """Return the family by general.architecture and the router's score function (None without experts).

    Mixtral is a llama with experts, and DeepSeek-V3 a V2 with another score function.
    """
    for family in ARCHITECTURES:
        own = None if family.experts is None else family.experts.scores
        if family.gguf is not None and (family.gguf.architecture, own) == (name, scores):
            return family
    return None
