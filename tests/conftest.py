"""Fixtures that many tests share."""

import gc
from pathlib import Path

import pytest

from helpers.tiny_models import make_hf_model

LONGEST_FIRST = (
    *("test_smollm2", "test_drafter_contract", "test_serve", "test_drafters_under_rules"),
    *("test_drafted_distribution", "test_chains_of_guesses", "test_exactness", "test_trees_of_guesses"),
    *("test_served_answers", "test_engine_model_check", "test_drafters_smollm2", "test_cli"),
    *("test_rollouts_in_an_engine", "test_same_seed_same_text", "test_train_cli", "test_cuda_head_chains"),
    *("test_page", "test_trained_in_engine", "test_chat_cli", "test_attention", "test_cuda_decoder"),
    *("test_tensor_parallel", "test_families"),
    *("test_measured_policy", "test_served_side_by_side", "test_exit_without_close", "test_cuda_graphs"),
    "test_ray_cluster",
)
"""Files that take ten seconds and more: a file runs in one process, and none of these may be left alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays, and is not looked at again by every collection


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or objects of native modules (triton's) outlive them, which these complain about


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama as a Hugging Face directory."""
    return make_hf_model(tmp_path_factory.mktemp("tiny"), "llama", tied=True)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The GGUF file of the embedded default model."""
    from foreword.models.sources.resolve import resolve_model

    return resolve_model("smollm2-135m")
