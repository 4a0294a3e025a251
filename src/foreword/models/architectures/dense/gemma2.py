"""Gemma 2: norms around both halves of a layer, GeGLU, soft caps, scaled embeddings; every other layer has a window."""

from foreword.models.architectures.architecture import (
    AROUND_TENSORS,
    Architecture,
    GgufNames,
    Scales,
    StoredTensors,
    Window,
    WindowedLayers,
)
from foreword.models.architectures.switch import Switch
from foreword.models.config import Norms

GEMMA2 = Architecture(
    name="gemma2",
    models="Gemma 2",
    hf_class="Gemma2ForCausalLM",
    gguf=GgufNames("gemma2", interleaved=False, layer_tensors=AROUND_TENSORS, settings={}, deep=46),
    attention_bias=Switch(key="attention_bias"),
    output_bias=Switch(key="attention_bias"),
    norms=Norms.AROUND,
    window=Window(WindowedLayers.ALL_BUT_EVERY_NTH, period=2),
    scales=Scales(
        embedding_by_width=True,
        attention_root="query_pre_attn_scalar",
        attention_cap="attn_logit_softcapping",
        logits_cap="final_logit_softcapping",
    ),
    activation_key="hidden_activation",
    activation="gelu_pytorch_tanh",
    stored=StoredTensors(norms_minus_one=True),
)
