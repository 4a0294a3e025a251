"""Mixtral: Mistral with experts."""

from foreword.models.architectures.architecture import (
    EXPERT_TENSORS,
    LLAMA_TENSORS,
    Architecture,
    GgufNames,
    Rope,
    StoredTensors,
    Window,
    WindowedLayers,
)
from foreword.models.architectures.experts import ExpertKeys
from foreword.models.architectures.switch import Switch

MIXTRAL = Architecture(
    name="mixtral",
    models="Mixtral",
    hf_class="MixtralForCausalLM",
    gguf=GgufNames("llama", interleaved=True, layer_tensors=LLAMA_TENSORS | EXPERT_TENSORS, settings={}),
    window=Window(WindowedLayers.ALL, listed=False),
    rope=Rope(theta=1e6),
    experts=ExpertKeys(count=("num_local_experts",), size="intermediate_size", normalize=Switch(always=True)),
    kv_heads_may_be_missing=True,
    stored=StoredTensors(
        renamed=(
            (".block_sparse_moe.", ".mlp."),
            (".w1.", ".gate_proj."),
            (".w3.", ".up_proj."),
            (".w2.", ".down_proj."),
        )
    ),
)
