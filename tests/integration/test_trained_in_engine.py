"""What training measures is what the engine then does: tokens per pass of everything that can be trained."""

from pathlib import Path

import pytest
import torch

from foreword.acceptance.params import SamplingParams
from foreword.engine.assembly import make_core
from foreword.engine.config import EngineConfig
from foreword.engine.llm import LLM
from foreword.engine.loader import load_model
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.train.heads.decoders import DraftRecipe, ExitRecipe
from foreword.train.heads.dflash import DFlashRecipe
from foreword.train.heads.dflash2 import DFlash2Recipe
from foreword.train.heads.eagle3 import Eagle3Recipe
from foreword.train.heads.learner import Recipe
from foreword.train.heads.medusa import MedusaRecipe
from foreword.train.loop.evaluate import measure_tau
from foreword.train.loop.output import write_output
from foreword.train.loop.trainer import TrainPhase
from foreword.train.passes.decoder_target import DecoderTarget
from foreword.train.passes.plain_target import PlainTarget
from foreword.train.passes.target import FrozenTarget
from foreword.train.texts.batches import EndlessBatch, EngineBatch
from foreword.train.texts.documents import Document
from helpers.tiny_families import make_family
from helpers.tiny_training import greedy_documents, new_trainer

GUESSES = 2

CASES = {
    "draft_model": DraftRecipe(layers=1),
    "layer_skip": ExitRecipe(layer=1),
    "medusa": MedusaRecipe(heads=GUESSES, draft_vocab=200),
    "dflash": DFlashRecipe(layers=1, draft_tokens=GUESSES, draft_vocab=200),
    "dflash causal": DFlashRecipe(layers=1, draft_tokens=GUESSES, draft_vocab=200, causal=True),
    "dflash2": DFlash2Recipe(layers=2, draft_tokens=GUESSES, draft_vocab=200, selector_rank=8, candidates=6),
    "eagle3": Eagle3Recipe(draft_vocab=200),
    "eagle3 3.1": Eagle3Recipe(draft_vocab=200, drift_norms=True),
}


@pytest.fixture(scope="module")
def target(tiny_model: Path) -> PlainTarget:
    return PlainTarget.load(open_checkpoint(tiny_model), torch.device("cpu"), torch.float32, compiled=False)


@pytest.fixture(scope="module")
def documents(target: PlainTarget) -> list[Document]:
    return greedy_documents(EndlessBatch(target, rows=60, context=24, stop_ids=frozenset()), 120)


@pytest.mark.parametrize("method", CASES)
def test_tokens_per_pass_are_those_of_training(
    method: str, tiny_model: Path, target: PlainTarget, documents: list[Document], tmp_path: Path
):
    _compare(method, tiny_model, target, documents, tmp_path)


@pytest.mark.parametrize(
    ("family", "method"), [("granite_dense", "eagle3"), ("deepseek_v3", "dflash"), ("gemma2", "medusa")]
)
def test_so_are_those_of_other_families(family: str, method: str, tmp_path: Path):
    # With tied embeddings, a random model repeats itself, which can be learnt.
    model, _ = make_family(tmp_path / "model", family, tie_word_embeddings=True)
    loaded = load_model(str(model), device="cpu", dtype="float32")
    core = make_core(loaded, EngineConfig(max_num_seqs=60), "off")
    documents = greedy_documents(EngineBatch(core, rows=60), 120)
    target = DecoderTarget.load(loaded.checkpoint, torch.device("cpu"))
    _compare(method, model, target, documents, tmp_path)


def _compare(
    method: str, model: Path, target: FrozenTarget, documents: list[Document], tmp_path: Path
) -> None:
    """Train, then compare the tokens per pass that training and engine measure."""
    recipe: Recipe = CASES[method]
    trainer = new_trainer(recipe, target, documents[30:])
    trainer.train(TrainPhase(last_step=12, final=True))
    with torch.no_grad():
        for parameter in trainer.learner.parameters():  # as its files have them
            parameter.copy_(parameter.bfloat16())
    measured = measure_tau(trainer.learner, documents[:30], trainer.size, GUESSES).tau()
    write_output(tmp_path / "trained", trainer.learner.files(open_checkpoint(model), GUESSES))
    key = "adapter" if method == "layer_skip" else "model"
    config = {
        "method": method.split(maxsplit=1)[0],
        key: str(tmp_path / "trained"),
        "num_speculative_tokens": GUESSES,
        "fixed": True,
    }
    llm = LLM(str(model), device="cpu", dtype="float32", speculation=config)
    asked = documents[:30]
    params = [
        SamplingParams(temperature=0, max_tokens=len(document.tokens) - 2, ignore_eos=True)
        for document in asked
    ]
    tokens = passes = 0
    answers = llm.generate([document.tokens[:2].tolist() for document in asked], params)
    for document, found in zip(asked, answers, strict=True):
        answer = found.outputs[0]
        assert answer.token_ids == document.tokens[2:].tolist()
        assert answer.stats is not None
        tokens += answer.stats.output_tokens - answer.stats.first_tokens
        passes += answer.stats.passes - answer.stats.first_passes
    llm.close()
    assert measured > 1.1
    # Who guesses in the prompt's own pass leaves a little less to count.
    assert abs(tokens / passes - measured) < 0.2, (tokens / passes, measured)
