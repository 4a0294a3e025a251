"""What a backend cannot run is refused by name, before its weights are read."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foreword.backends.support import require_supported
from foreword.engine.loader import load_model
from foreword.errors import CheckpointError
from foreword.models.config import AttentionSpec, ExpertsSpec, LayerSpec, MlpSpec, ModelConfig, NormSpec
from foreword.models.rope_spec import RopeSpec
from helpers.cpu import needs_cpu_kernels
from helpers.tiny_models import make_hf_model

ATTENTION, MLP = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8), MlpSpec(64)
LAYER = LayerSpec(ATTENTION, MLP)
SOUND = ModelConfig(
    architecture="llama",
    vocab_size=100,
    hidden_size=32,
    context_length=128,
    layers=(LAYER,) * 3,
    norm=NormSpec(1e-5),
    rope=RopeSpec(1e4),
    tied_embeddings=True,
)


def with_layer(layer: LayerSpec) -> ModelConfig:
    return replace(SOUND, layers=(LAYER, layer, LAYER))


def test_plain_layers_are_fine():
    assert require_supported(SOUND, "cpu") == LAYER
    windowed = LayerSpec(replace(ATTENTION, window=128), MLP)  # as long as the context: it hides nothing
    assert require_supported(replace(SOUND, layers=(windowed,) * 3), "cpu") == windowed


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (with_layer(LayerSpec(ATTENTION, replace(MLP, activation="gelu"))), "activation 'gelu'"),
        (
            with_layer(LayerSpec(ATTENTION, replace(MLP, experts=ExpertsSpec(8, 2, 16)))),
            "a mixture of experts",
        ),
        (with_layer(LayerSpec(replace(ATTENTION, window=127), MLP)), "a sliding window"),
        (with_layer(LayerSpec(ATTENTION, MlpSpec(32))), "layers that differ"),
        (replace(SOUND, norm=NormSpec(1e-5, kind="layer")), "layer norms"),
        (replace(SOUND, layers=()), "no layers"),
    ],
)
def test_the_rest_is_named(config: ModelConfig, words: str):
    with pytest.raises(CheckpointError, match=words):
        require_supported(config, "cpu")


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_cpu_kernels)])
def test_every_backend_asks(tmp_path: Path, backend: str):
    path = make_hf_model(tmp_path, "llama")
    config = json.loads((path / "config.json").read_text()) | {"hidden_act": "gelu"}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"the {backend} backend cannot run this llama model: .*gelu"):
        load_model(str(path), device="cpu", backend=backend)
