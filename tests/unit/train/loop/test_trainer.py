"""Training makes chains longer, and an interruption changes nothing."""

import pytest
import torch

from foreword.train.heads.draft import DraftRecipe
from foreword.train.heads.eagle3 import Eagle3Recipe
from foreword.train.heads.learner import Recipe
from foreword.train.heads.medusa import MedusaRecipe
from foreword.train.loop.optimizer import TrainPhase
from foreword.train.passes.target import FrozenTarget
from foreword.train.texts.documents import Document
from helpers.tiny_training import new_trainer, trained


def test_tokens_per_pass_rise(target: FrozenTarget, documents: list[Document]):
    trainer, before, after = trained(Eagle3Recipe(draft_vocab=256), target, documents, steps=40)
    assert after > before + 0.35, (before, after)
    assert trainer.evaluate(documents[:30]).first_hit > 0.3


@pytest.mark.parametrize(
    "recipe", [Eagle3Recipe(draft_vocab=256), MedusaRecipe(heads=2, draft_vocab=64), DraftRecipe(layers=1)]
)
def test_a_resumed_run_ends_where_an_unbroken_one_does(
    recipe: Recipe, target: FrozenTarget, documents: list[Document]
):
    unbroken = new_trainer(recipe, target, documents)
    unbroken.train(TrainPhase(last_step=6))
    broken = new_trainer(recipe, target, documents)
    broken.train(TrainPhase(last_step=4))
    resumed = new_trainer(recipe, target, documents)
    resumed.load(broken.state())
    resumed.train(TrainPhase(first_step=4, last_step=6))
    for name, tensor in unbroken.learner.state_dict().items():
        assert torch.equal(resumed.learner.state_dict()[name], tensor), name


def test_a_stretch_ends_where_it_is_stopped(target: FrozenTarget, documents: list[Document]):
    trainer = new_trainer(MedusaRecipe(heads=1, draft_vocab=64), target, documents)
    trainer.train(TrainPhase(last_step=50, stop=lambda: trainer.step >= 3))
    assert trainer.step == 3
