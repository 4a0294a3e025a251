"""All families, by the names that files have for them."""

from foreword.models.architectures.architecture import Architecture
from foreword.models.architectures.llama import LLAMA
from foreword.models.architectures.mimo import MIMO
from foreword.models.architectures.mistral import MISTRAL
from foreword.models.architectures.qwen2 import QWEN2
from foreword.models.architectures.qwen3 import QWEN3

ARCHITECTURES: tuple[Architecture, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3, MIMO)

BY_HF_CLASS = {family.hf_class: family for family in ARCHITECTURES}

BY_GGUF_NAME = {family.gguf.architecture: family for family in ARCHITECTURES if family.gguf is not None}
