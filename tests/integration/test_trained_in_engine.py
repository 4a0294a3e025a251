"""What training measures is what the engine then does: tokens per pass of everything that can be trained."""

from pathlib import Path

import pytest
import torch

from foreword.acceptance.params import SamplingParams
from foreword.drafters.registry import drafter_kinds
from foreword.engine.llm import LLM
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.train.heads.decoders import DraftRecipe, ExitRecipe
from foreword.train.heads.dflash import DFlashRecipe
from foreword.train.heads.eagle3 import Eagle3Recipe
from foreword.train.heads.learner import Recipe
from foreword.train.heads.medusa import MedusaRecipe
from foreword.train.loop.evaluate import measure_tau
from foreword.train.loop.output import write_output
from foreword.train.passes.target import FrozenTarget
from foreword.train.texts.documents import Document
from helpers.tiny_training import greedy_documents, trained

GUESSES = 2

CASES = {
    "draft_model": DraftRecipe(layers=1),
    "layer_skip": ExitRecipe(layer=1),
    "medusa": MedusaRecipe(heads=GUESSES, draft_vocab=200),
    "dflash": DFlashRecipe(layers=1, draft_tokens=GUESSES, draft_vocab=200),
    "eagle3": Eagle3Recipe(draft_vocab=200),
}


@pytest.fixture(scope="module")
def target(tiny_model: Path) -> FrozenTarget:
    return FrozenTarget.load(open_checkpoint(tiny_model), torch.device("cpu"), torch.float32, compiled=False)


@pytest.fixture(scope="module")
def documents(target: FrozenTarget) -> list[Document]:
    return greedy_documents(target, 120)


@pytest.mark.parametrize("method", CASES)
def test_tokens_per_pass_are_those_of_training(
    method: str, tiny_model: Path, target: FrozenTarget, documents: list[Document], tmp_path: Path
):
    if method not in drafter_kinds():
        pytest.skip(f"no method {method}")
    recipe: Recipe = CASES[method]
    trainer, _, _ = trained(recipe, target, documents, steps=12)
    with torch.no_grad():
        for parameter in trainer.learner.parameters():  # as its files have them
            parameter.copy_(parameter.bfloat16())
    measured = measure_tau(trainer.learner, documents[:30], trainer.size, GUESSES).tau()
    write_output(tmp_path / "trained", trainer.learner.files(open_checkpoint(tiny_model), GUESSES))
    key = "adapter" if method == "layer_skip" else "model"
    config = {
        "method": method,
        key: str(tmp_path / "trained"),
        "num_speculative_tokens": GUESSES,
        "fixed": True,
    }
    llm = LLM(str(tiny_model), device="cpu", dtype="float32", speculation=config)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    tokens = passes = 0
    answers = llm.generate([document.tokens[:2].tolist() for document in documents[:30]], params)
    for document, found in zip(documents, answers, strict=False):
        answer = found.outputs[0]
        assert answer.token_ids == document.tokens[2:].tolist()
        assert answer.stats is not None
        tokens += answer.stats.output_tokens - answer.stats.first_tokens
        passes += answer.stats.passes - answer.stats.first_passes
    llm.close()
    assert measured > 1.2
    # Who guesses in the prompt's own pass leaves a little less to count.
    assert abs(tokens / passes - measured) < 0.2, (tokens / passes, measured)
