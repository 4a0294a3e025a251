"""A DFlash head: it learns, and a block is what one decoded by itself would be."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.rope import rotate
from foreword.train.heads.dflash import DFlashRecipe
from foreword.train.passes.packing import exact_size, pack, tail_begin
from foreword.train.passes.plain_target import PlainTarget
from foreword.train.texts.documents import Document
from helpers.tiny_training import new_learner, trained

RECIPE = DFlashRecipe(layers=2, draft_tokens=3, draft_vocab=256)


def test_tokens_per_pass_rise(target: PlainTarget, documents: list[Document]):
    recipe = DFlashRecipe(layers=1, draft_tokens=2, draft_vocab=256)
    _, before, after = trained(recipe, target, documents, steps=50)
    assert after > before + 0.35, (before, after)


def _norm(x, weight, eps):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _block(target: PlainTarget, weights, config, tokens, taps, place: int) -> torch.Tensor:
    """States of the masks after the newest token at `place`, from the file alone; the past ends before it."""
    eps, (heads, kv_heads, dim) = target.config.norm.eps, target.sizes
    past = _norm(
        torch.cat([tap[:place] for tap in taps], -1) @ weights["fc.weight"].T,
        weights["hidden_norm.weight"],
        eps,
    )
    size = config["block_size"]
    ids = torch.tensor([int(tokens[place]), *[config["mask_token_id"]] * (size - 1)])
    stream = target.weights.embedding[ids]
    past_turn = target.head_rotation(torch.arange(place))
    turn = target.head_rotation(torch.arange(place, place + size))
    for number in range(2):

        def part(name: str, number=number) -> torch.Tensor:
            return weights[f"layers.{number}.{name}.weight"]

        def split(rows, name: str, part=part) -> torch.Tensor:
            return (rows @ part(f"self_attn.{name}_proj").T).view(len(rows), -1, dim)

        normed = _norm(stream, part("input_layernorm"), eps)
        q = rotate(_norm(split(normed, "q"), part("self_attn.q_norm"), eps), *turn)
        keys = torch.cat(
            (
                rotate(_norm(split(past, "k"), part("self_attn.k_norm"), eps), *past_turn),
                rotate(_norm(split(normed, "k"), part("self_attn.k_norm"), eps), *turn),
            )
        ).repeat_interleave(heads // kv_heads, 1)
        values = torch.cat((split(past, "v"), split(normed, "v"))).repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) / dim**0.5
        if config["is_causal"]:
            hidden = torch.ones(size, place + size, dtype=torch.bool).triu(place + 1)
            scores = scores.masked_fill(hidden, -torch.inf)
        shares = scores.softmax(-1)
        seen = torch.einsum("hqk,khd->qhd", shares, values).flatten(1)
        stream = stream + seen @ part("self_attn.o_proj").T
        inner = _norm(stream, part("post_attention_layernorm"), eps)
        gated = silu(inner @ part("mlp.gate_proj").T) * (inner @ part("mlp.up_proj").T)
        stream = stream + gated @ part("mlp.down_proj").T
    return _norm(stream, weights["norm.weight"], eps)[1:]


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_a_batch_are_blocks_of_their_own(
    causal: bool, target: PlainTarget, documents: list[Document], tiny_model
):
    learner = new_learner(replace(RECIPE, causal=causal), target, documents)
    with torch.no_grad():
        learner.tap_scales.copy_(torch.tensor([0.5, 2.0, 1.5])[: len(learner.tap_scales)])
        generator = torch.Generator().manual_seed(0)
        for parameter in learner.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    files = learner.files(open_checkpoint(tiny_model), 3)
    weights = {name: tensor.float() for name, tensor in files.tensors.items()}
    assert not any(int((document.tokens == files.config["mask_token_id"]).sum()) for document in documents)
    texts = documents[:2]
    batch = pack(texts, exact_size(texts), target.device)
    features = target.features(batch, learner.taps)
    states = list(learner.steps(batch, features, 3))
    row = begin = 0
    for document in texts:
        taps = [tap[begin : begin + len(document.tokens)] for tap in features.taps]
        for slot in range(tail_begin(document), len(document.tokens)):
            if slot + 1 < len(document.tokens):
                wanted = _block(target, weights, files.config, document.tokens, taps, slot + 1)
                for step in range(3):
                    torch.testing.assert_close(states[step][row], wanted[step], rtol=5e-2, atol=5e-2)
            row += 1
        begin += len(document.tokens)
    assert np.isclose(row, sum(len(d.tokens) - tail_begin(d) for d in texts))


def test_weights_of_files_are_taken_up_again(target: PlainTarget, documents: list[Document], tiny_model):
    first, second = new_learner(RECIPE, target, documents), new_learner(RECIPE, target, documents)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(0.1)
    assert not torch.allclose(second.tap_scales, torch.ones(1))
    second.load_tensors(first.files(open_checkpoint(tiny_model), 3).tensors)
    for name, tensor in first.state_dict().items():
        torch.testing.assert_close(second.state_dict()[name], tensor, rtol=1e-2, atol=1e-2, msg=name)
