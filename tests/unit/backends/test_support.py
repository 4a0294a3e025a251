"""What no backend runs, or what cannot be trained, is refused by name, before its weights are read."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foreword.backends.support import require_plain, require_supported
from foreword.engine.loader import load_model
from foreword.errors import CheckpointError
from foreword.models.config import (
    AttentionSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    ModelConfig,
    Norms,
    NormSpec,
    RopeSpec,
)
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
    assert require_plain(SOUND) == require_supported(SOUND) == LAYER
    windowed = LayerSpec(replace(ATTENTION, window=128), MLP)  # as long as the context: it hides nothing
    assert require_plain(replace(SOUND, layers=(windowed,) * 3)) == windowed


LATENT = LatentSpec(kv_rank=8, query_rank=None, nope_dim=8, rope_dim=4, value_dim=8)
EXPERTS = with_layer(LayerSpec(ATTENTION, replace(MLP, experts=ExpertsSpec(8, 2, 16))))
SQUARED = with_layer(LayerSpec(ATTENTION, replace(MLP, activation="relu2")))
COMPRESSED = with_layer(LayerSpec(replace(ATTENTION, latent=LATENT), MLP))
WINDOW = with_layer(LayerSpec(replace(ATTENTION, window=127), MLP))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (with_layer(LayerSpec(ATTENTION, replace(MLP, activation="gelu_pytorch_tanh"))), "GeGLU"),
        (SQUARED, "MLPs of squared ReLU without a gate"),
        (WINDOW, "sliding-window attention; train eagle3"),
        (with_layer(LayerSpec(ATTENTION, MlpSpec(32))), "layers of different kinds"),
        (COMPRESSED, "latent attention"),
        (with_layer(LayerSpec(replace(ATTENTION, softcap=5.0), MLP)), "soft caps"),
        (with_layer(LayerSpec(ATTENTION, MLP, Norms.AFTER)), "norms after attention"),
        (replace(SOUND, embedding_scale=2.0), "scaled embeddings"),
        (
            with_layer(LayerSpec(ATTENTION, replace(MLP, activation="gelu"))),
            "no backend .* activation 'gelu'",
        ),
    ],
)
def test_what_cannot_be_trained_is_named(config: ModelConfig, words: str):
    with pytest.raises(CheckpointError, match=words):
        require_plain(config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (with_layer(LayerSpec(ATTENTION, replace(MLP, activation="gelu"))), "activation 'gelu'"),
        (replace(SOUND, norm=NormSpec(1e-5, kind="layer")), "layer norms"),
        (replace(SOUND, layers=()), "no layers"),
    ],
)
def test_what_no_backend_runs_is_named(config: ModelConfig, words: str):
    with pytest.raises(CheckpointError, match=words):
        require_supported(config)


def test_every_backend_has_what_cannot_be_trained():
    for config in (EXPERTS, WINDOW, SQUARED, COMPRESSED):
        require_supported(config)


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_cpu_kernels)])
def test_every_backend_asks(tmp_path: Path, backend: str):
    path = make_hf_model(tmp_path, "llama")
    config = json.loads((path / "config.json").read_text()) | {"hidden_act": "gelu"}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"no backend supports this llama model's .*gelu"):
        load_model(str(path), device="cpu", backend=backend)
