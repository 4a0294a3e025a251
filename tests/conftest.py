"""Fixtures that many tests share."""

import gc
from pathlib import Path

import pytest

from helpers.tiny_models import make_hf_model

LONGEST_FIRST = (
    *("test_drafter_contract", "test_rollouts_in_an_engine", "test_chains_of_guesses", "test_exactness"),
    *("test_smollm2", "test_engine_model_check", "test_drafted_distribution", "test_drafters_under_rules"),
    *("test_drafters_smollm2", "test_trees_of_guesses", "test_prove_server_cli"),
    *("test_same_seed_same_text", "test_train_cli", "test_cli", "test_page", "test_cuda_head_chains"),
    *("test_chat_cli", "test_server_hostile", "test_served_answers", "test_serve", "test_attention"),
    *("test_cuda_decoder", "test_shape_invariance", "test_fault_drill", "test_measured_policy"),
    *("test_trained_in_engine", "test_tensor_parallel", "test_families", "test_head_formats"),
    *("test_served_side_by_side", "test_catalogue", "test_cuda_graphs", "test_ray_cluster"),
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
