"""The full sampler from the library's front door, on a tiny model with a real tokenizer."""

from pathlib import Path

import pytest

from foreword import LLM, SamplingParams
from foreword.errors import RequestError
from helpers.tiny_models import make_hf_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tmp_path_factory.mktemp("tiny")
    return LLM(str(make_hf_model(folder, "llama")), device="cpu", dtype="float32")


def text_of(llm: LLM, params: SamplingParams) -> str:
    return llm.generate("the sky", params, raw=True)[0].outputs[0].text


def test_bad_words_stay_out_of_the_text(llm: LLM):
    base = SamplingParams(seed=4, max_tokens=40, ignore_eos=True)
    plain = text_of(llm, base)
    word = next(piece for piece in plain.split() if piece.isascii() and piece.isalpha())
    banned = SamplingParams(seed=4, max_tokens=40, ignore_eos=True, bad_words=(word,))
    ids = [llm.tokenizer.encode(t, add_special_tokens=False) for t in (word, f" {word}")]
    out = llm.generate("the sky", banned, raw=True)[0].outputs[0].token_ids
    for sequence in ids:
        assert all(out[i : i + len(sequence)] != sequence for i in range(len(out)))


def test_logprobs_come_in_vllms_shape(llm: LLM):
    answer = llm.generate("the sky", SamplingParams(seed=1, max_tokens=5, logprobs=2), raw=True)[0].outputs[0]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    for token, entries in zip(answer.token_ids, answer.logprobs, strict=True):
        assert 2 <= len(entries) <= 3
        assert entries[token].logprob <= 0
        assert {entry.rank for entry in entries.values()} >= {1, 2}
        assert entries[token].decoded_token == llm.tokenizer.decode([token], skip_special_tokens=False)


def test_no_logprobs_unless_asked_for(llm: LLM):
    assert llm.generate("x", SamplingParams(max_tokens=2), raw=True)[0].outputs[0].logprobs is None


def test_a_parameter_that_does_not_fit_the_model_is_refused_before_anything_runs(llm: LLM):
    with pytest.raises(RequestError, match="top_k"):
        text_of(llm, SamplingParams(top_k=100_000))
    assert not llm.engine.has_requests


def test_an_answer_can_be_had_again_by_its_seed(llm: LLM):
    first = llm.generate("the sky", SamplingParams(max_tokens=12, top_p=0.9), raw=True)[0].outputs[0]
    again = SamplingParams(max_tokens=12, top_p=0.9, seed=first.seed)
    assert text_of(llm, again) == first.text
