"""Training makes chains longer, and an interruption changes nothing."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foreword.errors import RequestError
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.heads.opening import open_head, without_copies
from foreword.models.heads.writing import quantize_head
from foreword.train.heads.decoders import DraftRecipe
from foreword.train.heads.eagle3 import Eagle3Recipe
from foreword.train.heads.learner import Recipe
from foreword.train.heads.medusa import MedusaRecipe
from foreword.train.loop.output import read_weights, write_output
from foreword.train.loop.trainer import TrainPhase
from foreword.train.passes.packing import PackedBatch, fitting_size, grouped
from foreword.train.passes.plain_target import PlainTarget
from foreword.train.passes.target import Features
from foreword.train.texts.documents import Document
from helpers.tiny_training import SETTINGS, new_trainer, trained


def test_tokens_per_pass_rise(target: PlainTarget, documents: list[Document]):
    trainer, before, after = trained(Eagle3Recipe(draft_vocab=256), target, documents, steps=25)
    assert after > before + 0.35, (before, after)
    assert trainer.evaluate(documents[:30]).first_hit > 0.3


@pytest.mark.parametrize(
    "recipe", [Eagle3Recipe(draft_vocab=256), MedusaRecipe(heads=2, draft_vocab=64), DraftRecipe(layers=1)]
)
def test_a_resumed_run_ends_where_an_unbroken_one_does(
    recipe: Recipe, target: PlainTarget, documents: list[Document]
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


def test_a_stretch_ends_where_it_is_stopped(target: PlainTarget, documents: list[Document]):
    trainer = new_trainer(MedusaRecipe(heads=1, draft_vocab=64), target, documents)
    trainer.train(TrainPhase(last_step=50, stop=lambda: trainer.step >= 3))
    assert trainer.step == 3


def test_kept_states_change_nothing_but_the_targets_work(
    target: PlainTarget, documents: list[Document], monkeypatch: pytest.MonkeyPatch
):
    """Over three epochs, with room for all batches, for one, and for none."""
    passes: list[int] = []
    features = target.features

    def counted(batch: PackedBatch, taps: Sequence[int]) -> Features:
        passes.append(len(taps))
        return features(batch, taps)

    recipe, some = Eagle3Recipe(draft_vocab=64), documents[:40]
    epoch = len(list(grouped(some, fitting_size(some, 440, 40))))
    monkeypatch.setattr(target, "features", counted)
    counts, trained_weights = [], []
    one = 4 * 440 * target.config.hidden_size * 4  # three taps and the last states, float32
    for room in (1 << 30, one, 0):
        trainer = new_trainer(recipe, target, some, replace(SETTINGS, kept_bytes=room))
        passes.clear()
        trainer.train(TrainPhase(last_step=3 * epoch))
        counts.append(len(passes))
        trained_weights.append(trainer.learner.state_dict())
    assert counts == [epoch, 3 * epoch - 2, 3 * epoch]
    for name, tensor in trained_weights[0].items():
        assert all(torch.equal(other[name], tensor) for other in trained_weights[1:]), name


def test_a_head_trains_with_the_weights_that_its_file_will_have(
    target: PlainTarget, documents: list[Document], tiny_model: Path, tmp_path: Path
):
    recipe = Eagle3Recipe(draft_vocab=64, intermediate=64, own_output=False)
    trainer = new_trainer(recipe, target, documents, replace(SETTINGS, round_bits=4))
    output = trainer.learner.output(0).clone()
    trainer.train(TrainPhase(last_step=5))
    assert trainer.learner.round_bits is None, "not before the rate decays"
    trainer.train(TrainPhase(first_step=5, last_step=18, final=True))
    rounded = trainer.evaluate(documents[:30])
    assert torch.equal(trainer.learner.output(0), output), "the target's rows are not trained"

    write_output(tmp_path / "head", trainer.learner.files(open_checkpoint(tiny_model), 3))
    opened = without_copies(open_head(tmp_path / "head"), open_checkpoint(tiny_model))
    assert not opened.spec.has("lm_head.weight")
    quantize_head(opened, tmp_path / "small", 4)
    again = new_trainer(recipe, target, documents)
    again.learner.load_tensors(read_weights(tmp_path / "small" / "model.safetensors"))
    assert again.evaluate(documents[:30]).tau() == pytest.approx(rounded.tau(), abs=0.02)


def test_what_cannot_be_rounded_is_refused_before_the_first_step(
    target: PlainTarget, documents: list[Document]
):
    with pytest.raises(RequestError, match="96 columns cannot be rounded"):
        new_trainer(Eagle3Recipe(draft_vocab=64), target, documents, replace(SETTINGS, round_bits=4))
