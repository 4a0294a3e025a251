"""Streams of OpenAI's routes say what whole answers say."""

import json
from itertools import product

import openai
import pytest

from foreword.drafters.config import SpeculationConfig
from foreword.server.settings import Limits, ServerSettings
from helpers.fake_engine import FakeEngine
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


CASES = [
    {"seed": seed, "n": n, "logprobs": logprobs, "stop": stop, "speculation": speculation}
    for seed, n, (logprobs, stop), speculation in product(
        range(9), (1, 3), ((None, None), (2, "A")), (True, False, {})
    )
]


def streamed_chat(client, case, extra):
    """A streamed answer put together as clients do."""
    chat_case = {"logprobs": True, "top_logprobs": 2} if case["logprobs"] else {}
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=12,
            seed=case["seed"],
            n=case["n"],
            stop=case["stop"],
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
            **chat_case,
        )
    )
    texts, ends, logprobs = [""] * case["n"], [None] * case["n"], [[] for _ in range(case["n"])]
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert chunks[-1].choices == []
    return texts, ends, logprobs, chunks[-1].usage, chunks[-2]


def test_streaming_equals_not_streaming_for_a_hundred_requests(server, client):
    assert len(CASES) >= 100
    for case in CASES:
        override = (
            {"method": "ngram", "num_speculative_tokens": 2}
            if case["speculation"] == {}
            else case["speculation"]
        )
        extra = {"speculation": override}
        texts, ends, logprobs, usage, last = streamed_chat(client, case, extra)
        chat_case = {"logprobs": True, "top_logprobs": 2} if case["logprobs"] else {}
        whole = client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=12,
            seed=case["seed"],
            n=case["n"],
            stop=case["stop"],
            extra_body=extra,
            **chat_case,
        )
        assert texts == [choice.message.content for choice in whole.choices]
        assert ends == [choice.finish_reason for choice in whole.choices]
        assert usage == whole.usage
        assert last.speculation["passes"] == whole.speculation["passes"]
        assert last.speculation["drafts"] == (0 if override is False else last.speculation["passes"])
        if case["logprobs"]:
            assert logprobs == [choice.logprobs.content for choice in whole.choices]


def test_streamed_completions_equal_whole_ones(server, client):
    for seed, n in product(range(10), (1, 2)):
        asked = {"model": "tiny", "prompt": ["ab", "c"], "max_tokens": 7, "seed": seed, "n": n, "logprobs": 1}
        whole = client.completions.create(**asked)
        texts, tokens, offsets = [""] * 2 * n, [[] for _ in range(2 * n)], [[] for _ in range(2 * n)]
        for chunk in client.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                tokens[choice.index] += choice.logprobs.tokens
                offsets[choice.index] += choice.logprobs.text_offset
        assert texts == [choice.text for choice in whole.choices]
        assert tokens == [choice.logprobs.tokens for choice in whole.choices]
        assert offsets == [choice.logprobs.text_offset for choice in whole.choices]


def test_a_stream_ends_with_done_and_no_usage_unless_asked(server):
    with server.http() as http:
        body = {"prompt": "x", "max_tokens": 3, "stream": True}
        answer = http.post("/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line for line in answer.text.split("\n\n") if line]
    assert events[-1] == "data: [DONE]"
    assert all("usage" not in json.loads(event.removeprefix("data: ")) for event in events[:-1])


@pytest.mark.parametrize("chat", [True, False])
def test_every_chunk_says_how_many_tokens_there_are_if_asked(server, client, chat):
    route = client.chat.completions if chat else client.completions
    asked = {"messages": MESSAGES} if chat else {"prompt": ["ab", "c"]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        route.create(model="tiny", max_tokens=9, seed=1, n=2, stream=True, stream_options=options, **asked)
    )
    prompts = [len(request.prompt_token_ids) for request in server.engine.requests[-(1 if chat else 2) :]]
    lengths = [0] * 2 * len(prompts)
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        lengths[choice.index] += len((choice.delta.content or "") if chat else choice.text)  # one per token
        used = chunk.usage
        assert (used.prompt_tokens, used.completion_tokens) == (
            prompts[choice.index // 2],
            lengths[choice.index],
        )
        assert used.total_tokens == used.prompt_tokens + used.completion_tokens
    assert lengths == [9] * len(lengths)
    assert chunks[-1].usage.completion_tokens == sum(lengths)
    assert chunks[-1].usage.prompt_tokens_details is not None


def test_continuous_usage_alone_asks_for_nothing(client):
    options = {"continuous_usage_stats": True}
    chunks = client.completions.create(model="tiny", prompt="x", stream=True, stream_options=options)
    assert all(chunk.usage is None for chunk in chunks)


def test_refused_while_streaming_is_a_status_and_not_an_event(server, client):
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model="tiny", prompt=[359, 360], max_tokens=2, stream=True)


def test_token_ids_of_a_prompt_are_sent_once_for_each_choice(client):
    asked = {"model": "tiny", "prompt": ["hello", "no"], "n": 2, "max_tokens": 6}
    extra = {"return_token_ids": True}
    whole = client.completions.create(**asked, extra_body=extra)
    expected = {choice.index: [choice.prompt_token_ids] for choice in whole.choices}
    found = {index: [] for index in expected}
    for chunk in client.completions.create(**asked, extra_body=extra, stream=True):
        for choice in chunk.choices:
            found[choice.index] += [ids for ids in [choice.model_extra.get("prompt_token_ids")] if ids]
    assert found == expected
