"""What is compiled on a GPU computes what it computes elsewhere, without being compiled again and again."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from foreword.train.heads.decoders import DraftRecipe, ExitRecipe
from foreword.train.heads.dflash import DFlashRecipe
from foreword.train.heads.eagle3 import Eagle3Recipe
from foreword.train.heads.learner import Recipe, choose_vocabulary, full_vocabulary
from foreword.train.heads.medusa import MedusaRecipe
from foreword.train.loop.trainer import Trainer, TrainPhase
from foreword.train.passes.packing import fitting_size
from foreword.train.passes.plain_target import PlainTarget
from foreword.train.texts.documents import Document
from helpers.tiny_training import SETTINGS

RECIPES = (
    DraftRecipe(layers=2),
    ExitRecipe(layer=1),
    MedusaRecipe(heads=2, blocks=2, draft_vocab=64),
    DFlashRecipe(layers=2, draft_tokens=2, draft_vocab=64),
    Eagle3Recipe(draft_vocab=64),
)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.method)
def test_compiled_steps_are_the_plain_ones(
    recipe: Recipe, target: PlainTarget, documents: list[Document], monkeypatch: pytest.MonkeyPatch
):
    # Traced, but not translated: that takes a GPU's compilers.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    found = []
    for compiled in (True, False):
        weights = target.weights
        own = PlainTarget(target.config, weights, compiled=compiled)
        vocab_size, wanted = target.config.vocab_size, recipe.draft_vocab
        vocabulary = (
            full_vocabulary(vocab_size)
            if wanted is None
            else choose_vocabulary(documents, wanted, vocab_size)
        )
        learner = recipe.build(own, vocabulary, compiled=compiled)
        learner.begin(documents, seed=0)
        settings = replace(SETTINGS, compiled=compiled)
        trainer = Trainer(learner, documents, fitting_size(documents, 440, 40), settings)
        trainer.train(TrainPhase(last_step=2))
        counted = torch._dynamo.utils.counters["stats"]  # imported by the first use: it takes seconds
        traced = counted["unique_graphs"]
        trainer.train(TrainPhase(first_step=2, last_step=4))
        assert counted["unique_graphs"] == traced, "a later step was traced again"
        found.append(learner.state_dict())
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=1e-4, atol=1e-5, msg=name)
