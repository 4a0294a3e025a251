"""MiMo: Qwen2 with MTP modules beside its layers."""

from foreword.models.architectures.architecture import Architecture, Switch, Window

MIMO = Architecture(
    name="mimo",
    hf_class="MiMoForCausalLM",
    attention_bias=Switch(always=True),
    window=Window.SOME_LAYERS,
)
