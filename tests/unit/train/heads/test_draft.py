"""Draft models: they learn, and any loader of models reads them."""

import numpy as np
import pytest
import torch

from foreword.acceptance.params import SamplingParams
from foreword.engine.llm import LLM
from foreword.errors import RequestError
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.train.heads.decoders import DraftRecipe
from foreword.train.loop.output import write_output
from foreword.train.passes.packing import exact_size, pack
from foreword.train.passes.plain_target import PlainTarget
from foreword.train.passes.target import wide_logits
from foreword.train.texts.documents import Document
from helpers.tiny_models import make_hf_model, write_gguf
from helpers.tiny_training import new_learner, trained


@pytest.mark.parametrize(
    "recipe",
    [DraftRecipe(layers=1), DraftRecipe(layers=1, hidden=32, heads=2, kv_heads=1, intermediate=48)],
    ids=["copied", "own shape"],
)
def test_tokens_per_pass_rise(recipe: DraftRecipe, target: PlainTarget, documents: list[Document]):
    _, before, after = trained(recipe, target, documents, steps=60)
    assert after > before + 0.35, (before, after)


def test_all_layers_copied_are_the_target(target: PlainTarget, documents: list[Document]):
    learner = new_learner(DraftRecipe(layers=target.config.num_layers), target, documents)
    text = documents[:3]
    batch = pack(text, exact_size(text), target.device)
    features = target.features(batch, ())
    for step, states in enumerate(learner.steps(batch, features, 3)):
        rows = (batch.tail_rows + step + 1).clamp(max=len(features.last) - 1)
        torch.testing.assert_close(states, features.last[rows])


@pytest.mark.parametrize("as_gguf", [False, True])
def test_it_loads_as_a_model_and_drafts(as_gguf: bool, tmp_path):
    source = make_hf_model(tmp_path / "target", "llama")
    model = write_gguf(source, tmp_path / "target.gguf") if as_gguf else source
    checkpoint = open_checkpoint(model)
    target = PlainTarget.load(checkpoint, torch.device("cpu"), torch.float32, compiled=False)
    recipe = DraftRecipe(layers=target.config.num_layers)
    learner = recipe.build(target, _whole(target))
    learner.begin([], seed=0)
    write_output(tmp_path / "draft", learner.files(checkpoint, 3))
    draft = open_checkpoint(tmp_path / "draft")
    text = np.arange(5, 25)
    assert draft.tokenizer().encode("the sky is blue") == checkpoint.tokenizer().encode("the sky is blue")
    assert draft.tokenizer().eos_ids == checkpoint.tokenizer().eos_ids
    config = {"method": "draft_model", "model": str(tmp_path / "draft"), "fixed": True}
    llm = LLM(str(model), device="cpu", speculation=config)
    plain = LLM(str(model), device="cpu", speculation="off")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answers = [engine.generate(text.tolist(), params)[0].outputs[0] for engine in (llm, plain)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].stats is not None and answers[0].stats.accepted > 0
    llm.close()


def _whole(target: PlainTarget):
    from foreword.train.heads.learner import full_vocabulary

    return full_vocabulary(target.config.vocab_size)


def test_the_files_logits_are_the_learners(
    target: PlainTarget, documents: list[Document], tiny_model, tmp_path
):
    recipe = DraftRecipe(layers=2, hidden=32, heads=2, kv_heads=1, intermediate=48)
    learner = new_learner(recipe, target, documents)
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.copy_(parameter.bfloat16())
    write_output(tmp_path / "draft", learner.files(open_checkpoint(tiny_model), 3))
    checkpoint = open_checkpoint(tmp_path / "draft")
    loaded = PlainTarget.load(checkpoint, torch.device("cpu"), torch.float32, compiled=False)
    text = documents[:2]
    batch = pack(text, exact_size(text), target.device)
    states = next(learner.steps(batch, target.features(batch, ()), 1))
    rows = (batch.tail_rows + 1).clamp(max=len(batch.token_ids) - 1)
    wanted = wide_logits(loaded.features(batch, ()).last[rows], loaded.weights.head)
    torch.testing.assert_close(wide_logits(states, learner.output(0)), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "recipe",
    [DraftRecipe(copied=(0, 7)), DraftRecipe(copied=(0,), hidden=32), DraftRecipe(heads=3, kv_heads=2)],
)
def test_shapes_that_do_not_fit_are_refused_in_a_line(recipe: DraftRecipe, target: PlainTarget):
    with pytest.raises(RequestError, match=r"layers|fit together"):
        recipe.build(target, _whole(target))
