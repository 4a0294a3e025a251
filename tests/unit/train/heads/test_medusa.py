"""Medusa heads: they learn, and their file says what they do."""

import torch
from torch.nn.functional import silu

from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.heads.files import HeadFiles
from foreword.models.heads.names import head_kind
from foreword.train.heads.learner import Learner
from foreword.train.heads.medusa import MedusaRecipe
from foreword.train.loop.output import write_output
from foreword.train.passes.packing import exact_size, pack
from foreword.train.passes.plain_target import PlainTarget
from foreword.train.texts.documents import Document
from helpers.tiny_training import new_learner, trained

RECIPE = MedusaRecipe(heads=3, blocks=2, draft_vocab=256)


def test_tokens_per_pass_rise(target: PlainTarget, documents: list[Document]):
    # A tiny random target mostly says a token again, which the heads begin with: they begin knowing nothing here.
    _, before, after = trained(RECIPE, target, documents, steps=60, prepare=_forget)
    assert after > before + 0.35, (before, after)


def _forget(learner: Learner) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for step in range(RECIPE.heads):
            learner.output(step).copy_(torch.randn(learner.output(step).shape, generator=generator) * 0.02)


def test_the_file_says_what_the_heads_do(
    target: PlainTarget, documents: list[Document], tiny_model, tmp_path
):
    learner = new_learner(RECIPE, target, documents)
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.1)
            parameter.copy_(parameter.bfloat16())
    write_output(tmp_path / "head", learner.files(open_checkpoint(tiny_model), 3))
    files = HeadFiles(tmp_path / "head")
    assert head_kind(files.shapes) == "medusa"
    text = documents[:1]
    batch = pack(text, exact_size(text), target.device)
    features = target.features(batch, learner.taps)
    ids = files.stored("token_map")
    for head, states in enumerate(learner.steps(batch, features, 3)):
        found = features.last[batch.tail_rows]
        for block in range(2):
            name = f"blocks.{head}.layers.{block}"
            found = found + silu(found @ files.load(f"{name}.weight").T + files.load(f"{name}.bias"))
        logits = found @ files.load(f"lm_heads.{head}.weight").T
        mine = states @ learner.output(head).T
        torch.testing.assert_close(mine, logits)
        assert torch.equal(ids, learner.vocabulary.token_ids)


def test_weights_of_files_are_taken_up_again(target: PlainTarget, documents: list[Document], tiny_model):
    first, second = new_learner(RECIPE, target, documents), new_learner(RECIPE, target, documents)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.copy_((parameter + 0.1).bfloat16())
    second.load_tensors(first.files(open_checkpoint(tiny_model), 3).tensors)
    for name, tensor in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor), name
