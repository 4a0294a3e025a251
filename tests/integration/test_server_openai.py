"""The official client against a server with the fake engine: every field, both ways of answering."""

import json
import time
from dataclasses import asdict
from itertools import product

import msgspec
import openai
import pytest

from foreword.acceptance.params import SamplingDefaults, SamplingParams
from foreword.drafters.config import SpeculationConfig
from foreword.engine.messages import RequestStats
from foreword.server.api.answer_types import usage_of
from foreword.server.settings import Limits, ServerSettings
from helpers.fake_engine import FakeEngine, expected_tokens, token_text
from helpers.local_server import local_server

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tiny_model):
    settings = ServerSettings(
        "tiny", limits=Limits(running=256, queued=0), speculation=SpeculationConfig.parse({"method": "ngram"})
    )
    with local_server(tiny_model, settings, FakeEngine(step_seconds=0.0005, capacity=64)) as running:
        yield running


@pytest.fixture
def client(server):
    return server.openai()


def expected_text(server, index=0):
    """What the fake engine must have answered to the last request."""
    request = server.engine.requests[-1]
    return "".join(map(token_text, expected_tokens(request, index, request.params.max_tokens)))


def test_completion_fields(server, client):
    answer = client.completions.create(model="tiny", prompt="hello", max_tokens=20, seed=3)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "tiny"
    assert answer.system_fingerprint.startswith("foreword-")
    assert abs(answer.created - time.time()) < 600
    (choice,) = answer.choices
    assert choice.text == expected_text(server)
    assert (choice.finish_reason, choice.index, choice.logprobs, choice.seed) == ("length", 0, None, 3)
    prompt = len(server.engine.requests[-1].prompt_token_ids)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, 20, prompt + 20)
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert answer.timings["predicted_n"] == 20
    assert answer.timings["prompt_n"] == prompt
    told = answer.speculation
    assert told["method"] == "ngram"
    assert told["tau"] == pytest.approx(20 / told["passes"])
    assert told["acceptance_rate"] == pytest.approx(told["accepted"] / told["drafted"])
    assert len(told["acceptance_per_position"]) == 2
    assert answer.timings["draft_n_accepted"] == told["accepted"] > 0


def test_chat_fields(server, client):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=9, seed=4)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == expected_text(server)
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 9
    again = [*MESSAGES, choice.message.model_dump(), {"role": "user", "content": "and?"}]
    assert client.chat.completions.create(model="tiny", messages=again, max_tokens=2).usage.prompt_tokens > 30


def test_the_chat_template_is_the_models(server, client):
    client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a<|im_end|>"}, {"type": "text", "text": "b"}],
            },
        ],
        max_tokens=1,
    )
    tokenizer = server.context.prompts.tokenizer
    shown = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a<|im_end|>b"}]
    assert list(server.engine.requests[-1].prompt_token_ids) == tokenizer.encode_chat(shown)


def test_every_sampling_parameter_reaches_the_engine(server, client):
    extra = {
        "top_k": 7,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [8, 9],
        "bad_words": ["bad", "words"],
        "allowed_token_ids": [5, 6, 7],
        "prompt_logprobs": 1,
        "include_stop_str_in_output": True,
        "speculation": {"method": "ngram", "num_speculative_tokens": 3},
    }
    given = {
        "temperature": 0.5,
        "top_p": 0.75,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"5": -3, "11": 100},
        "n": 2,
        "seed": 2**64 - 1,
        "stop": ["~~~", "###"],
    }
    wanted = SamplingParams(
        **{
            k: v
            for k, v in extra.items()
            if k not in ("stop_token_ids", "bad_words", "allowed_token_ids", "speculation")
        },
        **given | {"logit_bias": {5: -3.0, 11: 100.0}, "stop": ("~~~", "###")},
        stop_token_ids=(8, 9),
        bad_words=("bad", "words"),
        allowed_token_ids=(5, 6, 7),
        max_tokens=5,
        logprobs=2,
    )
    client.completions.create(model="tiny", prompt="x", max_tokens=5, logprobs=2, extra_body=extra, **given)
    client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_completion_tokens=5,
        logprobs=True,
        top_logprobs=2,
        extra_body=extra,
        **given,
    )
    with server.http() as http:
        body = {"prompt": "x", "max_tokens": 5, "logprobs": 2} | given | extra
        assert http.post("/generate", json=body).status_code == 200
    for request in server.engine.requests[-3:]:
        assert asdict(request.params) == asdict(wanted)
        assert request.speculation == {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize("value", [0, 1, 0.0])
def test_plain_numbers_are_numbers(server, client, value):
    client.completions.create(model="tiny", prompt="x", max_tokens=1, temperature=value)
    assert server.engine.requests[-1].params.temperature == value


def test_negative_seeds_are_seeds(server, client):
    client.completions.create(model="tiny", prompt="x", max_tokens=1, seed=-1)
    assert server.engine.requests[-1].params.seed == 2**64 - 1


def test_several_prompts_and_answers_keep_their_order(server, client):
    answer = client.completions.create(model="tiny", prompt=["a", "bb", "ccc"], n=2, max_tokens=4, seed=1)
    assert [choice.index for choice in answer.choices] == list(range(6))
    by_prompt = {request.request_id[-1]: request for request in server.engine.requests[-3:]}
    for prompt, index in product(range(3), range(2)):
        request = by_prompt[str(prompt)]
        expected = "".join(map(token_text, expected_tokens(request, index, 4)))
        assert answer.choices[2 * prompt + index].text == expected
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == sum(len(r.prompt_token_ids) for r in by_prompt.values())


def test_stops(server, client):
    whole = client.completions.create(model="tiny", prompt="q", max_tokens=30, seed=5).choices[0].text
    stop = whole[10:12]
    answer = client.completions.create(model="tiny", prompt="q", max_tokens=30, seed=5, stop=stop)
    (choice,) = answer.choices
    assert choice.text == whole[: whole.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    body = {"include_stop_str_in_output": True}
    kept = client.completions.create(
        model="tiny", prompt="q", max_tokens=30, seed=5, stop=[stop], extra_body=body
    )
    assert kept.choices[0].text == whole[: whole.index(stop)] + stop


def test_completion_logprobs(server, client):
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=3, logprobs=2)
    found = answer.choices[0].logprobs
    assert "".join(found.tokens) == answer.choices[0].text
    assert found.token_logprobs == [-0.5] * 3
    assert found.text_offset == [0, 1, 2]
    assert found.top_logprobs == [{"!": -1.0, '"': -2.0}] * 3


def test_chat_logprobs(server, client):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=1
    )
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    for entry in content:
        assert entry.bytes == list(entry.token.encode())
        assert [(top.token, top.logprob, top.bytes) for top in entry.top_logprobs] == [("!", -1.0, [33])]


def test_prompt_logprobs(server, client):
    body = {"prompt_logprobs": 1}
    answer = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=1, extra_body=body)
    first, *rest = answer.choices[0].prompt_logprobs
    assert first is None
    assert [set(entry) for entry in rest] == [{"3", "6"}, {"3", "7"}]
    assert rest[0]["6"] == {"logprob": -0.5, "rank": 2, "decoded_token": token_text(6)}


def test_what_a_request_does_not_name_is_the_models_default(tiny_model):
    settings = ServerSettings("tiny", sampling=SamplingDefaults({"temperature": 0.2, "top_p": 0.9}))
    with local_server(tiny_model, settings, FakeEngine(step_seconds=0.0005)) as server:
        client = server.openai()
        for answer in (
            lambda **given: client.chat.completions.create(model="tiny", messages=MESSAGES, **given),
            lambda **given: client.completions.create(model="tiny", prompt="hello", **given),
            lambda **given: server.http().post("/generate", json={"prompt": "hello", **given}),
        ):
            answer(max_tokens=2)
            params = server.engine.requests[-1].params
            assert (params.temperature, params.top_p) == (0.2, 0.9)
            answer(max_tokens=2, temperature=1.0)
            params = server.engine.requests[-1].params
            assert (params.temperature, params.top_p) == (1.0, 0.9)


def test_a_prediction_reaches_the_engine_as_tokens(server, client):
    tokenizer = server.context.prompts.tokenizer
    expected = tuple(tokenizer.encode("the sky <|im_end|>", add_special_tokens=False, parse_special=False))
    parts = [{"type": "text", "text": "the sky "}, {"type": "text", "text": "<|im_end|>"}]
    for content in ("the sky <|im_end|>", parts):
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=4, prediction={"type": "content", "content": content}
        )
        assert server.engine.requests[-1].prediction == expected
        assert answer.usage.completion_tokens_details is None  # the fake engine counts none
    body = {"prompt": "hello", "max_tokens": 2, "prediction": "the sky <|im_end|>"}
    assert server.http().post("/generate", json=body).status_code == 200
    assert server.engine.requests[-1].prediction == expected
    assert server.http().post("/generate", json={**body, "prediction": [5, 6]}).status_code == 200
    assert server.engine.requests[-1].prediction == (5, 6)
    for bad in ({"type": "text", "content": "a"}, {"type": "content"}, "text"):
        with pytest.raises(openai.BadRequestError, match="prediction"):
            client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"prediction": bad})


def test_usage_counts_predicted_tokens_where_there_were_any():
    counted = usage_of(RequestStats(accepted_prediction_tokens=5, rejected_prediction_tokens=2))
    told = json.loads(msgspec.json.encode(counted))["completion_tokens_details"]
    assert told == {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2}
    assert b"completion_tokens_details" not in msgspec.json.encode(usage_of(RequestStats()))


def test_a_response_with_several_answers_is_refused_by_name(server):
    with server.http() as http:
        said = http.post("/v1/responses", json={"input": "hello", "n": 2})
    assert (said.status_code, said.json()["error"]["param"]) == (400, "n")


def test_events_of_a_response_have_their_type_as_name(server):
    with server.http() as http:
        text = http.post(
            "/v1/responses", json={"input": "hello", "max_output_tokens": 3, "stream": True}
        ).text
    events = [block.split("\n") for block in text.strip().split("\n\n")]
    assert [name for name, _ in events] == [f"event: {json.loads(data[6:])['type']}" for _, data in events]
    assert events[-1][0] == "event: response.incomplete"


def test_items_of_a_response_have_its_status(server):
    said = server.openai().responses.create(model="tiny", input="hello", max_output_tokens=3)
    assert [item.status for item in said.output] == [said.status] == ["incomplete"]


def test_an_echo_alone_counts_no_token_of_the_answer(server):
    usage = server.openai().completions.create(model="tiny", prompt="hello", max_tokens=0, echo=True).usage
    assert (usage.completion_tokens, usage.total_tokens) == (0, usage.prompt_tokens)
