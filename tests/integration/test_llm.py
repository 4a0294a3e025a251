"""The library on a tiny model: prompts in, answers out, nothing left behind."""

from pathlib import Path

import pytest
import torch

from foreword import LLM, SamplingParams
from foreword.engine.config import EngineConfig
from foreword.engine.messages import NewRequest
from foreword.errors import RequestError

PROMPTS = ["the sky is", "def add(", "1999 and 2024", "she sells sea shells by the sea shore; " * 4]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), dtype="float32", device="cpu")


def texts(llm: LLM, prompts: list[str], params: SamplingParams | list[SamplingParams]) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_batch_answers_as_each_prompt_alone(llm: LLM, temperature: float):
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=11)
    assert texts(llm, PROMPTS, params) == [texts(llm, [prompt], params)[0] for prompt in PROMPTS]


def test_the_same_seed_gives_the_same_text_and_another_seed_another(llm: LLM):
    def sample(seed: int) -> str:
        return texts(llm, ["the"], SamplingParams(temperature=1.0, max_tokens=24, seed=seed))[0]

    assert sample(5) == sample(5)
    assert len({sample(seed) for seed in range(6)}) == 6


def test_without_a_seed_a_fresh_one_is_returned_and_gives_the_text_again(llm: LLM):
    first = llm.generate("the", SamplingParams(max_tokens=16))[0].outputs[0]
    second = llm.generate("the", SamplingParams(max_tokens=16))[0].outputs[0]
    assert first.seed != second.seed
    assert texts(llm, ["the"], SamplingParams(max_tokens=16, seed=first.seed)) == [first.text]


def test_fresh_seeds_survive_javascript(llm: LLM):
    seeds = {llm.engine.prepare(NewRequest("r", (5,)))[0].sampler.seed for _ in range(64)}
    assert len(seeds) == 64
    assert 2**45 < max(seeds) < 2**53


def test_control_tokens_are_parsed_in_raw_prompts_unless_that_is_switched_off(llm: LLM):
    text = "<|im_start|>user"
    params = SamplingParams(max_tokens=1, temperature=0)
    parsed = llm.generate(text, params, raw=True)[0].prompt_token_ids
    assert parsed == [1, *llm.tokenizer.encode("user")]
    plain = llm.generate(text, params, raw=True, parse_special=False)[0].prompt_token_ids
    assert plain == llm.tokenizer.encode(text) != parsed
    assert llm.encode(text) == llm.tokenizer.encode_chat([{"role": "user", "content": text}])


def test_the_prompt_chunk_size_does_not_change_the_answer(tiny_model: Path, llm: LLM):
    chunked = LLM(
        str(tiny_model), dtype="float32", device="cpu", config=EngineConfig(max_num_batched_tokens=7)
    )
    params = SamplingParams(temperature=0.7, max_tokens=20, seed=3)
    assert texts(chunked, PROMPTS, params) == texts(llm, PROMPTS, params)


def test_streamed_pieces_are_the_text(llm: LLM):
    pieces: dict[int, str] = {}

    def collect(index: int, text: str) -> None:
        pieces[index] = pieces.get(index, "") + text

    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=40, seed=1), on_text=collect)
    assert [pieces[i] for i in range(len(PROMPTS))] == [output.outputs[0].text for output in outputs]


def test_an_answer_ends_at_eos_unless_told_to_go_on(llm: LLM):
    eos = next(iter(llm.tokenizer.eos_ids))
    long = SamplingParams(temperature=1.5, max_tokens=400, seed=2, ignore_eos=True)
    going_on = llm.generate("the", long)[0].outputs[0]
    assert going_on.finish_reason == "length"
    assert eos in going_on.token_ids, "the seed must draw an end for this test to mean something"
    ended = llm.generate("the", SamplingParams(temperature=1.5, max_tokens=400, seed=2))[0].outputs[0]
    assert ended.finish_reason == "stop"
    assert ended.token_ids == going_on.token_ids[: going_on.token_ids.index(eos) + 1]
    assert "<|im_end|>" not in ended.text


def test_chat_and_a_templated_prompt_are_the_same_request(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=8, seed=1)
    chat = llm.chat([{"role": "user", "content": "hello"}], params)[0]
    templated = llm.generate("hello", params)[0]
    assert chat.prompt_token_ids == templated.prompt_token_ids
    raw = llm.generate("hello", params, raw=True)[0]
    assert len(raw.prompt_token_ids) < len(templated.prompt_token_ids)
    assert llm.generate({"prompt_token_ids": raw.prompt_token_ids}, params)[0].outputs == raw.outputs


def test_each_prompt_may_have_its_own_parameters(llm: LLM):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5)]
    outputs = llm.generate(["a", "b"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5]
    with pytest.raises(RequestError, match="2 prompts"):
        llm.generate(["a", "b"], params[:1])


def test_more_requests_than_pages_wait_their_turn(tiny_model: Path, llm: LLM):
    page_bytes = llm.engine.target.kv_rows().bytes_per_row * 16
    config = EngineConfig(kv_cache_memory_bytes=6 * page_bytes)
    small = LLM(str(tiny_model), dtype="float32", device="cpu", config=config)
    params = SamplingParams(temperature=0.9, max_tokens=30, seed=8)
    assert texts(small, PROMPTS[:3] * 4, params) == texts(llm, PROMPTS[:3] * 4, params)
    assert small.engine.cache.available_pages == 6


def test_an_error_in_the_callback_frees_everything(llm: LLM):
    free = llm.engine.cache.available_pages

    def explode(_index: int, _text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SamplingParams(max_tokens=40, seed=1), on_text=explode)
    assert llm.engine.cache.available_pages == free
    assert not llm.engine.has_requests


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_token_ids": []}, "no tokens"),
        ({"prompt_token_ids": [1, 99999]}, "99999"),
        ({"prompt_token_ids": [1] * 512}, "512 tokens"),
        ({"tokens": [1]}, "prompt_token_ids"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(llm: LLM, prompt: dict, message: str):
    free = llm.engine.cache.available_pages
    with pytest.raises(RequestError, match=message):
        llm.generate(["fine", prompt])
    assert not llm.engine.has_requests
    assert llm.engine.cache.available_pages == free


def test_the_context_bounds_prompt_and_answer(llm: LLM):
    output = llm.generate({"prompt_token_ids": [5] * 500}, SamplingParams(max_tokens=100, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 12
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -1}, {"temperature": float("nan")}, {"max_tokens": 0}, {"seed": -1}, {"seed": 2**64}],
)
def test_bad_parameters_are_refused_by_name(bad: dict):
    with pytest.raises(RequestError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_prompts_may_be_token_ids(llm: LLM):
    greedy = SamplingParams(temperature=0, max_tokens=6)
    ids = llm.encode("the sky")
    expected = llm.generate("the sky", greedy)[0]
    for prompts in (ids, [ids], {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}], torch.tensor(ids)):
        (found,) = llm.generate(prompts, greedy)
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert found.prompt_token_ids == ids
    both = llm.generate([ids, "the sky"], greedy)
    assert [output.outputs[0].text for output in both] == [expected.outputs[0].text] * 2
    assert llm.generate([], greedy) == []
    with pytest.raises(RequestError, match="whole numbers"):
        llm.generate([[1, 2.5]], greedy)


def test_parameters_have_two_names(llm: LLM):
    greedy = SamplingParams(temperature=0, max_tokens=6)
    expected = llm.generate("the sky", greedy)[0].outputs[0].text
    assert llm.generate("the sky", sampling_params=greedy)[0].outputs[0].text == expected
    messages = [{"role": "user", "content": "the sky"}]
    assert llm.chat(messages, sampling_params=greedy)[0].outputs[0].text == expected
    for ask in (lambda **both: llm.generate("a", **both), lambda **both: llm.chat(messages, **both)):
        with pytest.raises(RequestError, match="give one"):
            ask(params=greedy, sampling_params=greedy)
