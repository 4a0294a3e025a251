"""Embeddings with more rows than the tokenizer has tokens: the rest is never drawn, guessed or counted."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from foreword import LLM, SamplingParams
from foreword.engine.config import EngineConfig
from foreword.errors import RequestError
from foreword.models.formats.checkpoint import open_checkpoint
from helpers.cpu import needs_cpu_kernels
from helpers.passes import all_logits, torch_decoder
from helpers.tiny_models import TINY_VOCAB, make_hf_model, write_gguf

PADDED = TINY_VOCAB + 40
IDS = [5, 80, 200, 11, 340, 17]


def make_padded(directory: Path, seed: int = 0) -> Path:
    """Its padding rows are the most likely ones wherever they are let in."""
    path = make_hf_model(directory, "llama", tied=False, seed=seed, vocab_size=PADDED)
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"][TINY_VOCAB:] *= 8
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def hf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_padded(tmp_path_factory.mktemp("padded") / "model")


@pytest.fixture(scope="module", params=["hf", "gguf"])
def path(request: pytest.FixtureRequest, hf_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "hf":
        return hf_path
    return write_gguf(hf_path, tmp_path_factory.mktemp("padded") / "model.gguf")


def make_llm(path: Path, backend: str = "torch", **more: Any) -> LLM:
    return LLM(str(path), device="cpu", backend=backend, dtype="float32", **more)


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_cpu_kernels)])
def test_padding_ids_never_come_out(path: Path, backend: str):
    llm = make_llm(path, backend)
    params = [SamplingParams(seed=seed, temperature=2.0, max_tokens=20, ignore_eos=True) for seed in range(4)]
    drawn = [
        token
        for output in llm.generate([{"prompt_token_ids": IDS}] * 4, params)
        for token in output.outputs[0].token_ids
    ]
    assert len(drawn) == 80
    assert max(drawn) < TINY_VOCAB
    assert int(all_logits(torch_decoder(path), IDS).argmax(-1).max()) >= TINY_VOCAB, "padding must be likely"


def test_log_probabilities_are_over_real_ids(path: Path):
    params = SamplingParams(seed=1, temperature=0, max_tokens=1, logprobs=2, prompt_logprobs=0)
    output = make_llm(path).generate({"prompt_token_ids": IDS}, params)[0]
    expected = all_logits(torch_decoder(path), IDS)[:, :TINY_VOCAB].double().log_softmax(-1)
    assert output.prompt_logprobs is not None
    for row, (token, found) in enumerate(zip(IDS[1:], output.prompt_logprobs[1:], strict=True)):
        assert found is not None
        assert found[token].logprob == pytest.approx(float(expected[row, token]), abs=1e-4)
    answer = output.outputs[0]
    assert answer.logprobs is not None
    best = int(expected[-1].argmax())
    assert answer.token_ids[0] == best
    assert answer.logprobs[0][best].logprob == pytest.approx(float(expected[-1, best]), abs=1e-4)


def test_a_prompt_with_a_padding_id_is_refused(path: Path):
    with pytest.raises(RequestError, match=f"token id {TINY_VOCAB} .* vocabulary of {TINY_VOCAB}"):
        make_llm(path).generate({"prompt_token_ids": [1, TINY_VOCAB]}, SamplingParams())


def test_the_size_is_the_tokenizers_in_both_formats(path: Path):
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.vocab_size == PADDED
    tokenizer = checkpoint.tokenizer()
    assert tokenizer.vocab_size == TINY_VOCAB
    assert tokenizer.token_bytes(PADDED - 1) == b""


DRAFTERS: list[dict[str, Any]] = [
    {"method": "draft_model"},
    {"method": "draft_model", "tree_width": 2},
    {"method": "layer_skip"},
    {"method": "self_quantized"},
]


@pytest.mark.parametrize("rule", ["coupled", "token", "block"])
@pytest.mark.parametrize("form", DRAFTERS, ids=str)
def test_no_drafter_guesses_padding(hf_path: Path, tmp_path: Path, form: dict[str, Any], rule: str):
    """Of the target's padding, or of its own where the draft model has more."""
    if form.get("tree_width", 1) > 1 and rule != "coupled":
        pytest.skip("trees are judged by coupled alone")
    model = {"model": str(make_padded(tmp_path / "draft", seed=0))} if form["method"] == "draft_model" else {}
    llm = make_llm(
        hf_path,
        config=EngineConfig(acceptance_rule=rule),
        speculation={**form, **model, "num_speculative_tokens": 4, "fixed": True},
    )
    params = SamplingParams(seed=3, temperature=1.0, max_tokens=40, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": IDS}] * 3, params)
    assert all(max(output.outputs[0].token_ids) < TINY_VOCAB for output in outputs)
    stats = llm.engine.stats()
    assert not stats.drafter_faults
    ((drafts, drafted, accepted),) = stats.acceptance.values()
    assert drafts > 0
    if form == {"method": "draft_model"}:  # the same weights: nothing is lost to padding
        assert accepted > 0.5 * drafted


def test_a_draft_model_with_fewer_tokens_never_guesses_the_others(tiny_model: Path, tmp_path: Path):
    """It reads tokens that it does not know as one of its own."""
    small = tmp_path / "small"
    shutil.copytree(tiny_model, small)
    shrink(small, TINY_VOCAB - 30)
    plain = make_llm(tiny_model)
    drafting = make_llm(
        tiny_model,
        speculation={
            "method": "draft_model",
            "model": str(small),
            "num_speculative_tokens": 4,
            "fixed": True,
        },
    )
    params = SamplingParams(seed=3, temperature=1.0, max_tokens=40, ignore_eos=True, logit_bias={355: 3.0})
    prompt = {"prompt_token_ids": [5, TINY_VOCAB - 1, 9]}
    expected, found = (llm.generate(prompt, params)[0].outputs[0] for llm in (plain, drafting))
    assert found.token_ids == expected.token_ids
    stats = drafting.engine.stats()
    assert not stats.drafter_faults
    assert sum(accepted for _, _, accepted in stats.acceptance.values()) > 0


def shrink(directory: Path, size: int) -> None:
    """Leave out the last tokens, in the tokenizer and in the weights."""
    stored = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    model = stored["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < size}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    (directory / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8")) | {"vocab_size": size}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = load_file(directory / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name] = weights[name][:size].clone()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
