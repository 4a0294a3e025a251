"""What a backend cannot run is refused by name, before its weights are read."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foreword.backends.choice import BackendChoice, fit_to_model
from foreword.backends.support import require_supported
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
    assert require_supported(SOUND, "cpu") == LAYER
    windowed = LayerSpec(replace(ATTENTION, window=128), MLP)  # as long as the context: it hides nothing
    assert require_supported(replace(SOUND, layers=(windowed,) * 3), "cpu") == windowed


LATENT = LatentSpec(kv_rank=8, query_rank=None, nope_dim=8, rope_dim=4, value_dim=8)
EXPERTS = with_layer(LayerSpec(ATTENTION, replace(MLP, experts=ExpertsSpec(8, 2, 16))))
SQUARED = with_layer(LayerSpec(ATTENTION, replace(MLP, activation="relu2")))
COMPRESSED = with_layer(LayerSpec(replace(ATTENTION, latent=LATENT), MLP))
WINDOW = with_layer(LayerSpec(replace(ATTENTION, window=127), MLP))


@pytest.mark.parametrize(
    ("config", "backend", "words"),
    [
        (with_layer(LayerSpec(ATTENTION, replace(MLP, activation="gelu"))), "torch", "activation 'gelu'"),
        (with_layer(LayerSpec(ATTENTION, replace(MLP, activation="gelu_pytorch_tanh"))), "training", "GeGLU"),
        (SQUARED, "cuda", "MLPs of squared ReLU without a gate; use --backend torch"),
        (WINDOW, "training", "sliding-window attention; use another model"),
        (with_layer(LayerSpec(ATTENTION, MlpSpec(32))), "training", "layers of different kinds"),
        (COMPRESSED, "training", "latent attention"),
        (with_layer(LayerSpec(replace(ATTENTION, softcap=5.0), MLP)), "training", "soft caps"),
        (with_layer(LayerSpec(ATTENTION, MLP, Norms.AFTER)), "training", "norms after attention"),
        (replace(SOUND, embedding_scale=2.0), "training", "scaled embeddings"),
        (replace(SOUND, norm=NormSpec(1e-5, kind="layer")), "cpu", "layer norms"),
        (replace(SOUND, layers=()), "torch", "no layers"),
    ],
)
def test_the_rest_is_named(config: ModelConfig, backend: str, words: str):
    with pytest.raises(CheckpointError, match=words):
        require_supported(config, backend)


@pytest.mark.parametrize("backend", ["cpu", "cuda", "torch"])
def test_every_backend_has_windows_and_experts(backend: str):
    for config in (EXPERTS, WINDOW):
        require_supported(config, backend)


def test_auto_falls_to_torch_where_the_faster_backend_cannot_run_a_model():
    chosen, gpu = BackendChoice("cuda", None, torch.bfloat16, "the fastest"), torch.device("cuda")
    found = fit_to_model(chosen, SQUARED, backend="auto", dtype="auto", device=gpu)
    assert (found.name, found.torch_dtype) == ("torch", torch.bfloat16)
    assert found.reason.startswith("the cuda backend does not support MLPs of squared ReLU")
    assert fit_to_model(chosen, SQUARED, backend="cuda", dtype="auto", device=gpu) is chosen
    assert fit_to_model(chosen, SOUND, backend="auto", dtype="auto", device=gpu) is chosen


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_cpu_kernels)])
def test_every_backend_asks(tmp_path: Path, backend: str):
    path = make_hf_model(tmp_path, "llama")
    config = json.loads((path / "config.json").read_text()) | {"hidden_act": "gelu"}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=f"the {backend} backend does not support this llama model's .*gelu"
    ):
        load_model(str(path), device="cpu", backend=backend)
