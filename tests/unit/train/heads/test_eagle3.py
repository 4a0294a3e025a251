"""The unrolled chain against a head that drafts step by step as EAGLE-3 says, from its exported file."""

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

from foreword.models.rope import rotate
from foreword.train.heads.eagle3 import Eagle3Recipe, default_taps
from foreword.train.heads.learner import HeadVocabulary, vocabulary_tensors
from foreword.train.passes.packing import BatchSize, pack, tail_begin
from foreword.train.passes.plain_target import PlainTarget
from foreword.train.texts.documents import make_document

DEPTH = 3


def _norm(x, weight, eps):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _draft(target: PlainTarget, tensors, tokens, taps, begin: int, is_31: bool) -> list[torch.Tensor]:
    """Logits of a chain that starts from the true slots 0 .. begin and is fed the text's own tokens."""
    eps, (num_heads, kv_heads, head_dim) = target.config.norm.eps, target.sizes
    weights = {name: tensor.float() for name, tensor in tensors.items()}

    def layer(name: str) -> torch.Tensor:
        return weights[f"layers.0.{name}.weight"]

    keys, values, logits = [], [], []
    feature = None
    for slot in range(begin + DEPTH):
        inputs = [tap[slot] for tap in taps]
        if is_31:
            inputs = [_norm(x, weights[f"fc_norm.{index}.weight"], eps) for index, x in enumerate(inputs)]
        state = weights["fc.weight"] @ torch.cat(inputs) if slot <= begin else feature
        normed = _norm(state, layer("hidden_norm"), eps)
        token = _norm(target.weights.embedding[tokens[slot + 1]], layer("input_layernorm"), eps)
        joined = torch.cat((token, normed))
        rotation = target.rotation(torch.tensor([slot]))

        def heads(name: str, joined=joined) -> torch.Tensor:
            return (layer(f"self_attn.{name}") @ joined).view(1, -1, head_dim)

        keys.append(rotate(heads("k_proj"), *rotation)[0])
        values.append(heads("v_proj")[0])
        if slot < begin:
            continue
        queries = rotate(heads("q_proj"), *rotation)[0]
        group = num_heads // kv_heads
        seen = torch.stack(keys).repeat_interleave(group, 1)
        weighting = (torch.einsum("hd,shd->hs", queries, seen) / head_dim**0.5).softmax(-1)
        attended = torch.einsum("hs,shd->hd", weighting, torch.stack(values).repeat_interleave(group, 1))
        stream = normed + layer("self_attn.o_proj") @ attended.flatten()
        inner = _norm(stream, layer("post_attention_layernorm"), eps)
        gated = silu(layer("mlp.gate_proj") @ inner) * (layer("mlp.up_proj") @ inner)
        feature = stream + layer("mlp.down_proj") @ gated
        output = _norm(feature, weights["norm.weight"], eps)
        logits.append(weights["lm_head.weight"] @ output)
        feature = output if is_31 else feature
    return logits


@pytest.mark.parametrize("is_31", [False, True])
def test_unrolled_chains_are_the_chains_that_a_drafter_makes(is_31: bool, target: PlainTarget):
    torch.manual_seed(0)
    vocab = target.config.vocab_size
    vocabulary = HeadVocabulary.of(torch.arange(0, 128, 2), vocab, 1.0)
    random = np.random.default_rng(0)
    documents = [
        make_document(random.integers(0, vocab, length).tolist(), [(begin, length)], "x", 0.0)
        for length, begin in ((14, 5), (9, 3))
    ]
    head = Eagle3Recipe(drift_norms=is_31).build(target, vocabulary)
    head.begin(documents, seed=1)
    with torch.no_grad():
        if not is_31:
            head.tap_scales.copy_(torch.tensor([0.5, 2.0, 1.5]))
        for parameter in head.parameters():  # a head that is used to nothing
            parameter.add_(torch.randn(parameter.shape) * 0.1)
            parameter.copy_(parameter.bfloat16())  # as the file keeps them
        head.matrices["fc"].mul_(2.0)
    rows = sum(len(document.tokens) for document in documents) + 6
    tails = sum(len(document.tokens) - tail_begin(document) for document in documents) + 2
    batch = pack(documents, BatchSize(rows, tails), target.device)
    features = target.features(batch, head.taps)
    states = list(head.steps(batch, features, DEPTH))
    tensors = head.file_tensors() | vocabulary_tensors(vocabulary)
    assert torch.equal(torch.arange(64) + tensors["d2t"], vocabulary.token_ids)
    assert tensors["t2d"].sum() == 64
    row = begin = 0
    for document in documents:
        tokens = torch.from_numpy(document.tokens).long()
        taps = [tap[begin : begin + len(tokens)] for tap in features.taps]
        for slot in range(tail_begin(document), len(tokens)):
            if slot + DEPTH < len(tokens):
                wanted = _draft(target, tensors, tokens, taps, slot, is_31)
                for step in range(DEPTH):
                    got = head.lm_head @ states[step][row]
                    torch.testing.assert_close(got, wanted[step], rtol=2e-2, atol=2e-2)
            row += 1
        begin += len(tokens)


@pytest.mark.parametrize("layers", range(3, 40))
def test_the_boundaries_that_are_read_by_default_ascend(layers: int):
    taps = default_taps(layers)
    assert 1 <= taps[0] < taps[1] < taps[2] <= layers
    if layers >= 7:
        assert taps == (2, layers // 2, layers - 3)  # as published
