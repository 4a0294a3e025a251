"""MiMo: Qwen2 with MTP modules beside its layers."""

from foreword.models.architectures.architecture import QWEN_WINDOW, Architecture
from foreword.models.architectures.switch import Switch

MIMO = Architecture(
    name="mimo",
    models="MiMo-7B",
    hf_class="MiMoForCausalLM",
    attention_bias=Switch(always=True),
    window=QWEN_WINDOW,
)
