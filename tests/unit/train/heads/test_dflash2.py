"""A DFlash2 head begins as a DFlash head, and learns to choose among candidates by the token before."""

import torch

from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.heads.spec import SELECTOR
from foreword.train.heads.dflash import DFlashRecipe
from foreword.train.heads.dflash2 import DFlash2Recipe
from foreword.train.passes.packing import exact_size, pack
from foreword.train.passes.plain_target import PlainTarget
from foreword.train.texts.documents import Document
from helpers.tiny_training import new_learner, trained

SHAPE = {"layers": 1, "draft_tokens": 3, "draft_vocab": 256}
RECIPE = DFlash2Recipe(**SHAPE, selector_rank=16, candidates=8)


def test_a_new_head_drafts_as_dflash(target: PlainTarget, documents: list[Document]):
    ours = new_learner(RECIPE, target, documents)
    plain = new_learner(DFlashRecipe(**SHAPE), target, documents)
    with torch.no_grad():  # the same matrices
        for name, parameter in plain.weights().items():
            ours.weights()[name].copy_(parameter)
    batch = pack(documents[:2], exact_size(documents[:2]), target.device)
    features = target.features(batch, ours.taps)
    both = zip(ours.steps(batch, features, 3), plain.steps(batch, features, 3), strict=True)
    for mine, expected in both:
        torch.testing.assert_close(mine, expected)
        logits = mine @ ours.output(0).T
        previous = torch.zeros(len(mine), dtype=torch.int64)
        chosen = ours.draft_logits(logits, mine, previous)
        assert torch.equal(chosen.argmax(-1), logits.argmax(-1))
        assert (chosen > -torch.inf).sum(-1).tolist() == [8] * len(mine)


def test_the_selector_learns(target: PlainTarget, documents: list[Document]):
    trainer, before, after = trained(RECIPE, target, documents, steps=50)
    assert after > before + 0.35, (before, after)
    held_out = documents[:30]
    with torch.no_grad():
        trainer.learner.weights()[SELECTOR[1]].zero_()
    without = trainer.evaluate(held_out).tau()
    assert after > without + 0.05, (after, without)


def test_weights_of_files_are_taken_up_again(target: PlainTarget, documents: list[Document], tiny_model):
    first, second = (new_learner(RECIPE, target, documents) for _ in range(2))
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(0.1)
    second.take(first.files(open_checkpoint(tiny_model), 3).tensors)
    for name, tensor in first.state_dict().items():
        torch.testing.assert_close(second.state_dict()[name], tensor, rtol=1e-2, atol=1e-2, msg=name)
