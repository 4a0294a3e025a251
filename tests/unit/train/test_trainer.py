"""Training makes chains longer, and an interruption changes nothing."""

import random
from pathlib import Path

import pytest
import torch

from foreword.models.formats.opening import open_checkpoint
from foreword.train.documents import Document, make_document
from foreword.train.eagle3 import Eagle3Head, shape_for
from foreword.train.endless import EndlessBatch, Job
from foreword.train.optimizer import Rates
from foreword.train.packing import fitting_size
from foreword.train.schedule import Stretch
from foreword.train.target import Target
from foreword.train.trainer import Trainer, TrainSettings
from foreword.train.vocabulary import choose_vocabulary


@pytest.fixture(scope="module")
def target(tiny_model: Path) -> Target:
    return Target.load(open_checkpoint(tiny_model), torch.device("cpu"), torch.float32, compiled=False)


@pytest.fixture(scope="module")
def documents(target: Target) -> list[Document]:
    """Greedy answers to prompts of two tokens each."""
    dice = random.Random(0)
    found: list[Document] = []

    def job(prompt: list[int]) -> Job:
        def done(written: list[int]) -> None:
            found.append(make_document([*prompt, *written], [(2, 2 + len(written))], "x", 0.0))

        return Job(prompt, 16, 0.0, done)

    jobs = (job([dice.randrange(40), dice.randrange(10)]) for _ in range(240))
    for _ in EndlessBatch(target, rows=60, context=24, stop_ids=frozenset()).run(jobs):
        pass
    return found


def _trainer(target: Target, documents: list[Document]) -> Trainer:
    vocabulary = choose_vocabulary(documents, 256, target.config.vocab_size)
    head = Eagle3Head(shape_for(target, 256))
    head.begin_from(target, vocabulary.token_ids, seed=0)
    size = fitting_size(documents, 440, 40)
    return Trainer(
        target, head, vocabulary, documents, size, TrainSettings(rates=Rates(adam=4e-3), warm_up=5)
    )


def test_tokens_per_pass_rise(target: Target, documents: list[Document]):
    held_out, rest = documents[:30], documents[30:]
    trainer = _trainer(target, rest)
    before = trainer.evaluate(held_out)
    trainer.train(Stretch(last_step=60, final=True))
    after = trainer.evaluate(held_out)
    assert after.tau() > before.tau() + 0.35, (before, after)
    assert after.first_guess > before.first_guess + 0.15


def test_a_resumed_run_ends_where_an_unbroken_one_does(
    target: Target, documents: list[Document], tmp_path: Path
):
    unbroken = _trainer(target, documents)
    unbroken.train(Stretch(last_step=6))
    broken = _trainer(target, documents)
    broken.train(Stretch(last_step=4))
    broken.save(tmp_path / "state.pt")
    resumed = _trainer(target, documents)
    resumed.load(tmp_path / "state.pt")
    resumed.train(Stretch(first_step=4, last_step=6))
    for name, tensor in unbroken.head.state_dict().items():
        assert torch.equal(resumed.head.state_dict()[name], tensor), name
