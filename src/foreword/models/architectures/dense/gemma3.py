"""Gemma 3 (text): Gemma 2 with norms on heads; windowed layers turn by frequencies of their own."""

from dataclasses import replace

from foreword.models.architectures.architecture import (
    AROUND_TENSORS,
    QK_NORM_TENSORS,
    GgufNames,
    Rope,
    Window,
    WindowedLayers,
)
from foreword.models.architectures.dense.gemma2 import GEMMA2
from foreword.models.architectures.switch import Switch

GEMMA3 = replace(
    GEMMA2,
    name="gemma3",
    models="Gemma 3 (text)",
    hf_class="Gemma3ForCausalLM",
    gguf=GgufNames(
        "gemma3",
        interleaved=False,
        layer_tensors=AROUND_TENSORS | QK_NORM_TENSORS,
        settings={},
        deep=62,
    ),
    qk_norm=Switch(always=True),
    window=Window(WindowedLayers.ALL_BUT_EVERY_NTH, period=6, period_key="sliding_window_pattern"),
    rope=Rope(theta=1e6, local_theta=1e4),
)
