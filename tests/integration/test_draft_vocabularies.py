"""Draft models with another tokenizer: which tokens are shared, and texts and acceptance under speculation."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foreword import LLM, SamplingParams
from foreword.drafters.model.vocabularies import is_same_vocabulary, shared_tokens
from foreword.errors import RequestError
from foreword.models.formats.checkpoint import open_checkpoint
from helpers.drafted_answers import PROMPTS
from helpers.tiny_models import TINY_VOCAB, tiny_tokenizer_json

DROPPED = 12
"""Merged tokens at the end of the tiny vocabulary that a smaller vocabulary lacks."""

CPU = torch.device("cpu")


def with_other_ids(model: Path, path: Path, dropped: int = 0) -> Path:
    """The same model with its tokens in reverse order, without the last `dropped` merged tokens."""
    shutil.copytree(model, path)
    kept = TINY_VOCAB - dropped
    order = torch.arange(kept - 1, -1, -1)
    weights = load_file(path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name] = weights[name][order].clone()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config |= {"vocab_size": kept, "bos_token_id": kept - 2, "eos_token_id": kept - 3}
    (path / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads(tiny_tokenizer_json())
    vocabulary = tokenizer["model"]["vocab"]
    gone = {entry for entry, number in vocabulary.items() if number >= kept}
    tokenizer["model"]["vocab"] = {e: kept - 1 - n for e, n in vocabulary.items() if e not in gone}
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = [merge for merge in merges if "".join(merge) not in gone]
    for token in tokenizer["added_tokens"]:
        token["id"] = kept - 1 - token["id"]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


@pytest.fixture(scope="module")
def reversed_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_other_ids(tiny_model, tmp_path_factory.mktemp("reversed") / "model")


@pytest.fixture(scope="module")
def smaller(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_other_ids(tiny_model, tmp_path_factory.mktemp("smaller") / "model", DROPPED)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), dtype="float32", device="cpu", backend="cpu")


def answers(llm: LLM, speculation: Any, **params: Any) -> list[Any]:
    llm.speculate(speculation)
    sampling = SamplingParams(max_tokens=16, seed=3, ignore_eos=True, **params)
    return llm.generate(PROMPTS, sampling)


def drafting(model: Path, **more: Any) -> dict[str, Any]:
    return {
        "method": "draft_model",
        "model": str(model),
        "num_speculative_tokens": 4,
        "fixed": True,
        **more,
    }


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9}])
def test_the_target_with_other_ids_drafts_what_the_target_says(
    llm: LLM, reversed_model: Path, params: dict[str, Any]
):
    plain = answers(llm, None, **params)
    drafted = answers(llm, drafting(reversed_model), **params)
    for one, other in zip(plain, drafted, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert other.timings.draft_n == other.timings.draft_n_accepted > 2


@pytest.mark.parametrize("tree_width", [1, 3])
def test_a_smaller_vocabulary_changes_no_text(llm: LLM, smaller: Path, tree_width: int):
    plain = answers(llm, None, temperature=0.8)
    drafted = answers(
        llm, drafting(smaller, tree_width=tree_width, num_speculative_tokens=8), temperature=0.8
    )
    assert [one.outputs[0].token_ids for one in plain] == [one.outputs[0].token_ids for one in drafted]
    assert sum(one.timings.draft_n_accepted for one in drafted) > 20


def test_tokens_are_matched_by_their_bytes(tiny_model: Path, smaller: Path):
    target, draft = open_checkpoint(tiny_model), open_checkpoint(smaller)
    assert is_same_vocabulary(target.tokenizer(), target.tokenizer())
    assert shared_tokens(target, target, TINY_VOCAB, CPU) is None
    shared = shared_tokens(target, draft, TINY_VOCAB, CPU)
    assert shared is not None
    kept = TINY_VOCAB - DROPPED
    assert shared.to_draft[:kept].tolist() == list(range(kept - 1, -1, -1))
    ours, theirs = target.tokenizer(), draft.tokenizer()
    for token in range(kept, TINY_VOCAB):  # the last piece of what the draft model cannot write as one token
        text = ours.token_bytes(token).decode()
        assert int(shared.to_draft[token]) == theirs.encode(text, add_special_tokens=False)[-1]
    logits = shared.to_target(torch.arange(float(kept)).unsqueeze(0))
    assert logits.shape == (1, TINY_VOCAB)
    assert logits[0, :kept].tolist() == list(range(kept - 1, -1, -1))
    assert bool((logits[0, kept:] == -torch.inf).all())


def test_ends_of_answers_are_matched_though_their_names_differ(
    tiny_model: Path, reversed_model: Path, tmp_path: Path
):
    path = tmp_path / "renamed"
    shutil.copytree(reversed_model, path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (path / name).read_text()
        (path / name).write_text(text.replace("<|im_end|>", "</s>"))
    target, draft = open_checkpoint(tiny_model), open_checkpoint(path)
    shared = shared_tokens(target, draft, TINY_VOCAB, CPU)
    assert shared is not None
    end, own_end = target.tokenizer().control_tokens["<|im_end|>"], draft.tokenizer().control_tokens["</s>"]
    assert int(shared.to_draft[end]) == own_end


def test_vocabularies_without_a_common_token_are_refused(
    tiny_model: Path, reversed_model: Path, monkeypatch: pytest.MonkeyPatch
):
    target, draft = open_checkpoint(tiny_model), open_checkpoint(reversed_model)
    monkeypatch.setattr(
        "foreword.drafters.model.vocabularies._ids_by_content",
        lambda tokenizer: {str(id(tokenizer)): 0},
    )
    with pytest.raises(RequestError, match="no token in common"):
        shared_tokens(target, draft, TINY_VOCAB, CPU)
