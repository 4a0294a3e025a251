"""OLMo 2: norms after attention and MLP instead of before them, and on all query and key heads together."""

from foreword.models.architectures.architecture import (
    AROUND_TENSORS,
    QK_NORM_TENSORS,
    Architecture,
    GgufNames,
)
from foreword.models.architectures.switch import Switch
from foreword.models.config import Norms

OLMO2 = Architecture(
    name="olmo2",
    models="OLMo 2",
    hf_class="Olmo2ForCausalLM",
    gguf=GgufNames("olmo2", interleaved=False, layer_tensors=AROUND_TENSORS | QK_NORM_TENSORS, settings={}),
    attention_bias=Switch(key="attention_bias"),
    output_bias=Switch(key="attention_bias"),
    qk_norm=Switch(always=True),
    wide_qk_norm=True,
    norms=Norms.AFTER,
    kv_heads_may_be_missing=True,
)
