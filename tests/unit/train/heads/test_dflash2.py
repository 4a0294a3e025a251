"""A DFlash2 head begins as a DFlash head, and learns to choose among candidates by the token before."""

from dataclasses import replace

import torch

from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.heads.spec import SELECTOR
from foreword.train.heads.dflash import DFlashRecipe
from foreword.train.heads.dflash2 import DFlash2Recipe
from foreword.train.passes.packing import exact_size, pack, tail_begin
from foreword.train.passes.plain_target import PlainTarget
from foreword.train.texts.documents import Document
from helpers.slow_parallel_heads import SlowDFlash
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


def test_blocks_of_a_batch_are_those_of_the_published_mathematics(
    target: PlainTarget, documents: list[Document], tiny_model
):
    learner = new_learner(replace(RECIPE, layers=2), target, documents)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in learner.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_((parameter + noise).bfloat16())  # as the file has it
        learner.tap_scales.fill_(1.0)
    files = learner.files(open_checkpoint(tiny_model), 3)
    tensors = {name: tensor.float() for name, tensor in files.tensors.items()}
    slow = SlowDFlash(
        tensors | {"embed_tokens.weight": target.weights.embedding}, files.config["transformer_layer_config"]
    )
    texts = documents[:2]
    batch = pack(texts, exact_size(texts), target.device)
    features = target.features(batch, learner.taps)
    states = list(learner.steps(batch, features, 3))
    row = begin = 0
    for document in texts:
        tokens = document.tokens.tolist()
        taps = torch.cat([tap[begin : begin + len(tokens)] for tap in features.taps], dim=-1)
        for place in range(tail_begin(document) + 1, len(tokens) + 1):
            if place < len(tokens):
                size, mask = files.config["block_size"], files.config["mask_token_id"]
                wanted = slow.block(tokens[: place + 1], taps[:place], size, mask)[1:]
                for step in range(3):
                    torch.testing.assert_close(states[step][row].double(), wanted[step], rtol=1e-3, atol=1e-3)
            row += 1
        begin += len(tokens)


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
    second.load_tensors(first.files(open_checkpoint(tiny_model), 3).tensors)
    for name, tensor in first.state_dict().items():
        torch.testing.assert_close(second.state_dict()[name], tensor, rtol=1e-2, atol=1e-2, msg=name)
