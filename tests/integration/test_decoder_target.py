"""Targets of any family in training: their hidden states and logits are transformers', their heads the engine's."""

import random
from pathlib import Path

import pytest
import torch

from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.heads.writing import head_sizes
from foreword.train.passes import decoder_target
from foreword.train.passes.decoder_target import DecoderTarget
from foreword.train.passes.packing import BatchSize, PackedBatch, pack
from foreword.train.passes.plain_target import PlainTarget
from foreword.train.texts.documents import Document, make_document
from helpers.tiny_families import family_config, make_family
from helpers.trees import random_tokens

CPU = torch.device("cpu")
KINDS = [
    "gemma2", "gpt_oss", "deepseek_v3", "granite", "granite_dense", "qwen3_next", "nemotron_h", "lfm2",
]  # fmt: skip


def _documents(lengths: tuple[int, ...]) -> list[Document]:
    dice = random.Random(1)
    texts = [random_tokens(dice, length) for length in lengths]
    return [make_document(text, [(len(text) // 2, len(text))], "x", 0.0) for text in texts]


def _batch(documents: list[Document]) -> PackedBatch:
    """With rows of padding."""
    return pack(documents, BatchSize(160, 90), CPU)


@pytest.mark.parametrize("family", KINDS)
def test_states_and_logits_are_those_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(decoder_target, "_PASS_TEXTS", 2)  # so that a batch takes several passes
    path, theirs = make_family(tmp_path, family)
    target = DecoderTarget.load(open_checkpoint(path), CPU)
    taps = tuple(range(target.config.num_layers))
    documents = _documents((70, 9, 33))
    kept = target.features(_batch(_documents((5, 80))), taps)  # what an earlier pass left does not matter
    found = target.features(_batch(documents), taps)
    assert not found.last.is_inference() and len(found.last) == 160
    begin = 0
    for document in documents:
        rows = slice(begin, begin := begin + len(document.tokens))
        with torch.no_grad():
            expected = theirs(torch.from_numpy(document.tokens).long()[None], output_hidden_states=True)
        states = [state[0] for state in expected.hidden_states]
        for ours, wanted in zip((*found.taps, found.last), states, strict=True):
            _assert_close(ours[rows], wanted)
        ids = torch.tensor([7, 3, 200])
        _assert_close(target.logits(found.last[rows], target.weights.head[ids]), expected.logits[0][:, ids])
    assert not found.last[begin:].any() and kept.last.isfinite().all()


def _assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert float((ours - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max())


def test_both_targets_agree_on_llama(tiny_model: Path):
    checkpoint, batch = open_checkpoint(tiny_model), _batch(_documents((70, 9, 33)))
    general = DecoderTarget.load(checkpoint, CPU).features(batch, (0, 1, 2))
    plain = PlainTarget.load(checkpoint, CPU, torch.float32).features(batch, (0, 1, 2))
    for ours, theirs in zip((*general.taps, general.last), (*plain.taps, plain.last), strict=True):
        _assert_close(ours[:112], theirs[:112])


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3_next", (4, 2, 16, 2 * 24 + 40)),  # experts per token, and the shared one
        ("nemotron_h", (4, 2, 16, 2 * 24 + 40)),  # whose first layers have no attention
        ("deepseek_v3", (1, 1, 64, 2 * 24 + 2 * 24)),  # whose attention has no heads that a head could have
        ("gemma2", (4, 2, 24, 48)),
    ],
)
def test_sizes_of_heads(family: str, sizes: tuple[int, ...]):
    assert head_sizes(family_config(family)) == sizes
