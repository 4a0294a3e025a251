"""What is asked of the load generator, and what it asks of servers."""

import math
from typing import Any

import pytest

from foreword.bench.serve.load import LoadSettings, RequestTemplate, extra_fields
from foreword.errors import RequestError
from foreword.wire.openai_http import base_address


def test_a_body_holds_what_every_server_knows_and_nothing_of_ours():
    body = RequestTemplate("m", max_tokens=9, temperature=0.5, seed=100).body("hi", 7)
    assert body == {
        "model": "m",
        "prompt": "hi",
        "max_tokens": 9,
        "temperature": 0.5,
        "seed": 107,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    options = RequestTemplate("m", continuous_usage=True).body("hi", 0)["stream_options"]
    assert options == {"include_usage": True, "continuous_usage_stats": True}
    chat = RequestTemplate("m", "chat")
    assert chat.body("hi", 0)["messages"] == [{"role": "user", "content": "hi"}]
    assert "prompt" not in chat.body("hi", 0)
    assert (chat.path, RequestTemplate("m").path) == ("/v1/chat/completions", "/v1/completions")


def test_further_fields_are_passed_through_when_given():
    assert extra_fields(None, None) == {}
    assert extra_fields("off", None) == {"speculation": False}
    assert extra_fields('{"method": "ngram"}', '{"top_k": 3}') == {
        "speculation": {"method": "ngram"},
        "top_k": 3,
    }
    assert RequestTemplate("m", extra={"max_tokens": 1}).body("hi", 0)["max_tokens"] == 1


@pytest.mark.parametrize("text", ["ngram", "3", "[1]", "null", '{"a": NaN}', "[" * 100_000])
def test_bad_further_fields_are_refused_in_one_line(text: str):
    with pytest.raises(RequestError, match=r"^--speculation .*$"):
        extra_fields(text, None)
    with pytest.raises(RequestError, match=r"^--extra-body .*$"):
        extra_fields(None, text)


def test_the_address_is_taken_with_and_without_v1():
    for url in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"):
        assert base_address(url) == "http://h:1"
    assert base_address("https://h/proxy/v1") == "https://h/proxy"
    for url in (
        "",
        "h:1",
        "ftp://h",
        "http://",
        "http://h:x",
        "http://h:99999",
        "http://h/?a=1",
        "http://[h",
    ):
        with pytest.raises(RequestError, match="--url must be"):
            base_address(url)
    with pytest.raises(RequestError, match="password") as caught:
        base_address("http://me:secret@h:1")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "the load has no end"),
        ({"num_requests": 0}, "--num-requests"),
        ({"duration": 0.0}, "--duration"),
        ({"duration": math.inf}, "--duration"),
        ({"rate": 0.0, "num_requests": 1}, "--rate"),
        ({"rate": math.nan, "num_requests": 1}, "--rate"),
        ({"rate": math.inf, "duration": 1.0}, "--rate inf"),
        ({"concurrency": 0, "num_requests": 1}, "--concurrency"),
        ({"timeout": -1.0, "num_requests": 1}, "--timeout"),
        ({"disconnect": 1.1, "num_requests": 1}, "--disconnect"),
        ({"disconnect": math.nan, "num_requests": 1}, "--disconnect"),
    ],
)
def test_a_load_that_cannot_be_made_is_refused(fields: dict[str, Any], word: str):
    with pytest.raises(RequestError, match=word):
        LoadSettings(**fields)


@pytest.mark.parametrize(
    "fields",
    [{"endpoint": "embeddings"}, {"max_tokens": 0}, {"temperature": -1.0}, {"temperature": math.nan}],
)
def test_a_question_that_cannot_be_asked_is_refused(fields: dict[str, Any]):
    with pytest.raises(RequestError, match=f"--{next(iter(fields)).replace('_', '-')}"):
        RequestTemplate("m", **fields)
