"""Fixtures that many tests share. They import what they need: the process that hands out the tests runs none."""

import gc
import sys
from pathlib import Path
from zlib import crc32

import pytest

from helpers.core_seconds import CoreSeconds

LONGEST_FIRST = (
    *("test_recurrent", "test_prove_server_cli", "test_chains_of_guesses", "test_drafter_contract"),
    *("test_shape_invariance", "test_train_cli", "test_head_formats", "test_same_seed_same_text"),
    *("test_trees_of_guesses", "test_served_answers", "test_variants", "test_examination"),
    *("test_families", "test_serve", "test_hybrids", "test_memory"),
    *("test_cli", "test_hybrid_engine", "test_compiled", "test_trained_in_engine"),
    *(
        "test_measured_policy",
        "test_heads_at_once",
        "test_drafted_distribution",
        "test_rollouts_in_an_engine",
    ),
    *("test_smollm2", "test_cuda_head_chains", "test_exactness", "test_chat_cli"),
    *("test_trainer", "test_engine_model_check", "test_cuda_hybrids", "test_short_requests"),
    *("test_drafters_smollm2", "test_head_rows", "test_fault_drill", "test_demo"),
    *("test_bench_gpu_guesses", "test_cpu_hybrids", "test_warm_process", "test_schema_corpus"),
    *("test_hybrid_gguf", "test_kernels", "test_tensor_parallel", "test_routes"),
    *("test_rules", "test_threads", "test_parallel_hybrids", "test_attention"),
    *("test_cpu_decoder", "test_draft", "test_exit_without_close", "test_chat_template"),
    *("test_pruning", "test_dflash", "test_batch_cli", "test_server_same_text"),
    *("test_page", "test_ray_cluster", "test_serve_flood", "test_server_hostile"),
)
"""Files that take four seconds and more: a file runs in one process, and none of these may be left alone at the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--core-seconds", metavar="FILE", type=Path, help="Write core-seconds per test file as JSON."
    )


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("--core-seconds"):
        config.pluginmanager.register(CoreSeconds(file))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> object:
    gc.disable()  # imports make objects that stay: looking for garbage among them takes a tenth of the time
    try:
        return (yield)
    finally:
        gc.enable()


_freeze, _unfreeze = gc.freeze, gc.unfreeze
_frozen_modules = 0


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collections until the tests end.

    An engine's process unfreezes all objects when it ends. If it is a task of a test, every later collection would
    traverse all modules, which takes a third of a second.
    """
    gc.freeze = gc.unfreeze = lambda: None
    _freeze_modules()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> object:
    """After a file whose tests have imported a large package, exclude its objects, too."""
    found: object = yield
    if nextitem is not None and nextitem.path != item.path and len(sys.modules) > _frozen_modules + 100:
        gc.collect()
        _freeze_modules()
    return found


def _freeze_modules() -> None:
    global _frozen_modules  # noqa: PLW0603
    _frozen_modules = len(sys.modules)
    _freeze()


def pytest_unconfigure() -> None:
    _unfreeze()  # or objects of native modules (triton's) outlive them, which these complain about


@pytest.fixture(scope="session", autouse=True)
def quick_starts() -> None:
    from helpers.quick_starts import prepare_quick_starts

    prepare_quick_starts()


@pytest.fixture(autouse=True)
def same_numbers(request: pytest.FixtureRequest) -> None:
    """Draw the same random numbers in a test whatever ran before it."""
    import torch

    torch.manual_seed(crc32(request.node.nodeid.encode()))


@pytest.fixture
def whole_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is measured at the start."""
    from foreword.engine import profiles
    from helpers.quick_starts import WHOLE

    for name, value in WHOLE.items():
        monkeypatch.setattr(profiles, name, value)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama as a Hugging Face directory."""
    from helpers.tiny_models import make_hf_model

    return make_hf_model(tmp_path_factory.mktemp("tiny"), "llama", tied=True)


@pytest.fixture(scope="session")
def tiny_heads(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By method, a head that was taught texts of the tiny model."""
    from foreword import LLM
    from helpers.taught_heads import taught_heads

    llm = LLM(str(tiny_model), dtype="float32", device="cpu", backend="cpu")
    return taught_heads(llm, tiny_model, tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The GGUF file of the embedded default model."""
    from foreword.models.sources.resolve import resolve_model

    return resolve_model("smollm2-135m")
