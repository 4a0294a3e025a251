"""Each prompt of a batch may speculate its own way; the texts are the same."""

from pathlib import Path

import pytest

from foreword import LLM, SamplingParams
from foreword.engine.config import EngineConfig
from foreword.errors import RequestError

PROMPTS = ["the sky is", "def add(", "1999 and 2024", "she sells sea shells by the sea shore"]
PARAMS = SamplingParams(temperature=0.3, max_tokens=24, seed=11, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "fixed": True}
SUFFIX = {"method": "suffix", "fixed": True}


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    share = EngineConfig(max_draft_share=1e9)  # whatever guesses cost here those who want none
    return LLM(str(tiny_model), dtype="float32", device="cpu", speculation=NGRAM, config=share)


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, speculation=False)]


def test_prompts_of_one_batch_speculate_as_each_asks(llm: LLM, plain: list[list[int]]):
    settings = [None, False, SUFFIX, {"num_speculative_tokens": 2}]
    outputs = llm.generate(PROMPTS, PARAMS, speculation=settings)
    assert [output.outputs[0].token_ids for output in outputs] == plain
    stats = [output.outputs[0].stats for output in outputs]
    assert [s.method for s in stats if s] == ["ngram", "", "suffix", "ngram"]
    assert stats[0] is not None
    assert stats[1] is not None
    assert stats[3] is not None
    assert stats[0].drafted > 0
    assert stats[1].drafted == 0
    assert 0 < len(stats[3].drafted_per_position) <= 2


def test_one_setting_is_for_all_prompts(llm: LLM, plain: list[list[int]]):
    for setting, method in ((True, "ngram"), (SUFFIX, "suffix"), (False, "")):
        outputs = llm.generate(PROMPTS, PARAMS, speculation=setting)
        assert [output.outputs[0].token_ids for output in outputs] == plain
        assert {output.outputs[0].stats.method for output in outputs if output.outputs[0].stats} == {method}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"method": "oracle"}, "oracle"),
        ({"method": "ngram", "no_such_key": 1}, "no_such_key"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"max_depth": "deep"}, "max_depth"),
        ("magic", "magic"),
        ([False], "4 prompts"),
    ],
)
def test_a_bad_setting_is_refused_in_one_line_and_nothing_runs(llm: LLM, setting: object, message: str):
    with pytest.raises(RequestError, match=message) as refusal:
        llm.generate(PROMPTS, PARAMS, speculation=setting)  # type: ignore[arg-type]
    assert "\n" not in str(refusal.value)
    assert not llm.engine.has_requests


def test_a_bad_setting_in_the_middle_leaves_nothing_behind(llm: LLM, plain: list[list[int]]):
    with pytest.raises(RequestError, match="oracle"):
        llm.generate(PROMPTS, PARAMS, speculation=[None, None, {"method": "oracle"}, None])
    assert not llm.engine.has_requests
    assert llm.generate(PROMPTS[0], PARAMS)[0].outputs[0].token_ids == plain[0]


def test_speculation_changes_at_run_time(llm: LLM, plain: list[list[int]]):
    def generate() -> str:
        answer = llm.generate(PROMPTS[0], PARAMS)[0].outputs[0]
        assert answer.token_ids == plain[0]
        assert answer.stats is not None
        assert (answer.stats.drafted > 0) == (answer.stats.method == "ngram")
        return answer.stats.method

    assert generate() == "ngram"
    llm.speculate(None)
    assert generate() == ""
    with pytest.raises(RequestError, match="give a method"):
        llm.generate(PROMPTS[0], PARAMS, speculation={"num_speculative_tokens": 2})
    llm.speculate(NGRAM)
    assert generate() == "ngram"
    llm.engine.situation.speculating = False
    answer = llm.generate(PROMPTS[0], PARAMS)[0].outputs[0]
    llm.engine.situation.speculating = True
    assert answer.token_ids == plain[0]
    assert answer.stats is not None
    assert answer.stats.drafted == 0
    assert generate() == "ngram"


def test_answers_and_prompt_scores_come_in_vllms_shape(llm: LLM):
    params = SamplingParams(seed=1, n=3, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    output = llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, params)[0]
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    for answer in output.outputs:
        assert answer.logprobs is not None
        assert all(token in entry for token, entry in zip(answer.token_ids, answer.logprobs, strict=True))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    assert all(entry is not None and token in entry for token, entry in pairs)
    assert output.timings.predicted_n == 18


def test_a_stop_text_ends_the_streamed_text_too(llm: LLM):
    whole = llm.generate(PROMPTS[0], PARAMS)[0].outputs[0].text
    stop = whole[10:13]
    heard: list[str] = []
    stopping = SamplingParams(temperature=0.3, max_tokens=24, seed=11, ignore_eos=True, stop=stop)
    answer = llm.generate(PROMPTS[0], stopping, on_text=lambda _, text: heard.append(text))[0].outputs[0]
    assert answer.text == "".join(heard) == whole[: whole.index(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


def test_a_call_within_a_call_is_refused_and_nothing_is_lost(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, seed=1)
    refused: list[str] = []

    def call_again(_index: int, _text: str) -> None:
        with pytest.raises(RequestError, match="one call at a time") as caught:
            llm.generate("again", params)
        refused.append(str(caught.value))

    answer = llm.generate("hello", params, on_text=call_again)[0]
    assert refused
    assert len(answer.outputs[0].token_ids) == 6
    assert llm.generate("hello", params)[0].outputs == answer.outputs


def test_the_target_as_its_own_draft_model_is_always_right(llm: LLM, tiny_model: Path):
    """Over many pages of KV: one row that is read from elsewhere would change a draft."""
    itself = {
        "method": "draft_model",
        "model": str(tiny_model),
        "num_speculative_tokens": 4,
        "fixed": True,
        "draft_timeout": 60.0,
    }
    greedy = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    for output in llm.generate(PROMPTS, greedy, speculation=itself):
        stats = output.outputs[0].stats
        assert stats is not None
        assert stats.drafted - stats.accepted <= 4  # those after the end
        assert stats.accepted > 40
