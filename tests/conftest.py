"""Fixtures that many tests share."""

from pathlib import Path

import pytest

from helpers.tiny_models import make_hf_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama as a Hugging Face directory."""
    return make_hf_model(tmp_path_factory.mktemp("tiny"), "llama", tied=True)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The GGUF file of the embedded default model."""
    from foreword.models.sources.resolve import resolve_model

    return resolve_model("smollm2-135m")
