"""A tiny target's own texts, and learners that train on them in seconds."""

import random
from collections.abc import Callable, Sequence

from foreword.train.heads.learner import Learner, Recipe, choose_vocabulary, full_vocabulary
from foreword.train.loop.trainer import LearningRates, Trainer, TrainPhase, TrainSettings
from foreword.train.passes.packing import fitting_size
from foreword.train.passes.target import FrozenTarget
from foreword.train.texts.batches import Job, TextBatch
from foreword.train.texts.documents import Document, make_document

SETTINGS = TrainSettings(rates=LearningRates(adam=4e-3), warm_up=5)


def greedy_documents(batch: TextBatch, count: int = 240) -> list[Document]:
    """Greedy answers of 16 tokens to prompts of two tokens each, or shorter ones."""
    dice = random.Random(0)
    found: list[Document] = []

    def job(prompt: list[int]) -> Job:
        def done(written: list[int]) -> None:
            found.append(make_document([*prompt, *written], [(2, 2 + len(written))], "x", 0.0))

        return Job(prompt, 16, 0.0, done)

    jobs = (job([dice.randrange(40), dice.randrange(10)]) for _ in range(count))
    for _ in batch.run(jobs):
        pass
    return found


def new_learner(recipe: Recipe, target: FrozenTarget, documents: Sequence[Document]) -> Learner:
    vocab_size, wanted = target.config.vocab_size, recipe.draft_vocab
    vocabulary = (
        full_vocabulary(vocab_size) if wanted is None else choose_vocabulary(documents, wanted, vocab_size)
    )
    learner = recipe.build(target, vocabulary, compiled=False)
    learner.begin(documents, seed=0)
    return learner


def new_trainer(
    recipe: Recipe,
    target: FrozenTarget,
    documents: Sequence[Document],
    settings: TrainSettings = SETTINGS,
) -> Trainer:
    learner = new_learner(recipe, target, documents)
    return Trainer(learner, documents, fitting_size(documents, 440, 40), settings)


def trained(
    recipe: Recipe,
    target: FrozenTarget,
    documents: Sequence[Document],
    steps: int,
    prepare: Callable[[Learner], None] = lambda learner: None,
) -> tuple[Trainer, float, float]:
    """After some steps on all but the first texts: tokens per pass on these, before and after."""
    held_out, rest = documents[:30], documents[30:]
    trainer = new_trainer(recipe, target, rest)
    prepare(trainer.learner)
    before = trainer.evaluate(held_out).tau()
    trainer.train(TrainPhase(last_step=steps, final=True))
    return trainer, before, trainer.evaluate(held_out).tau()
