"""What the official client may not ask for is refused by the field's name."""

import httpx
import openai
import pytest

from foreword.drafters.config import SpeculationConfig
from foreword.server.settings import ServerSettings
from helpers.fake_engine import FakeEngine
from helpers.local_server import local_server

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tiny_model):
    settings = ServerSettings("tiny", speculation=SpeculationConfig.parse({"method": "ngram"}))
    with local_server(tiny_model, settings, FakeEngine(step_seconds=0.0005)) as running:
        yield running


@pytest.fixture
def client(server):
    return server.openai()


UNSUPPORTED = {
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "wav"},
    "reasoning_effort": "high",
    "store": True,
    "service_tier": "priority",
    "web_search_options": {},
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_name(server, client, field):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, extra_body={field: UNSUPPORTED[field]}
        )
    assert caught.value.param == field
    assert "not supported" in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": True}, "best_of"),
    ],
)
def test_the_older_routes_oddities_are_refused_by_name(server, client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", extra_body=fields)
    assert caught.value.param == param


def test_values_that_ask_for_nothing_are_accepted(server, client):
    client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=1,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        store=False,
        service_tier="auto",
        user="somebody",
        metadata={"a": "b"},
        prompt_cache_key="k",
        safety_identifier="s",
        modalities=["text"],
        extra_body={"audio": None, "reasoning_effort": None},
    )
    client.completions.create(
        model="tiny", prompt="x", max_tokens=1, echo=False, suffix="", best_of=1, user="u"
    )
    assert len(client.completions.create(model="tiny", prompt="x", max_tokens=1, n=2, best_of=2).choices) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"n": 17}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"speculation": {"method": "draft_model"}}, "speculation"),
        ({"speculation": {"method": "ngram", "draft_timeout": 5}}, "speculation"),
        ({"speculation": {"method": "suffix", "prompt_lookup_max": 5}}, "speculation"),
        ({"speculation": {"num_speculative_tokens": 0}}, "speculation"),
        ({"not_a_field": 1}, "not_a_field"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages.0.role"),
    ],
)
def test_what_is_out_of_bounds_names_the_field(server, client, fields, param):
    body = {"messages": MESSAGES} | fields
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body=body, cast_to=httpx.Response)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("field", ["speculation", "speculative"])
def test_a_bare_method_is_short_for_an_object(server, field):
    with server.http() as http:
        assert http.post("/generate", json={"prompt": "x", field: "suffix"}).status_code == 200
        assert server.engine.requests[-1].speculation == {"method": "suffix"}
        error = http.post("/generate", json={"prompt": "x", field: "off"}).json()["error"]
        assert error["param"] == "speculation"
        assert "one of grammar, ngram, suffix; false is for no guessing" in error["message"]
        error = http.post("/v1/completions", json={"prompt": "x", "speculation": 5}).json()["error"]
        assert 'such as {"method": "ngram"}' in error["message"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}], "part 1 is of type 'image_url'"),
        ([{"type": "input_audio", "input_audio": {}}], "part 0 is of type 'input_audio'"),
        (["x"], "no object with a type"),
        ({"type": "text", "text": "x"}, "a text or a list of text parts"),
        (5, "a text or a list of text parts"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_named(server, content, told):
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages.0.content"
    assert told in answer.json()["error"]["message"]


def test_a_prompt_that_does_not_fit_says_so(server, client):
    with pytest.raises(openai.BadRequestError, match="at most 511") as caught:
        client.completions.create(model="tiny", prompt=[5] * 512)
    assert caught.value.code == "context_length_exceeded"
    assert client.completions.create(model="tiny", prompt=[5] * 511).usage.completion_tokens == 1


def test_a_chat_without_max_tokens_may_fill_the_context(server, client):
    client.chat.completions.create(model="tiny", messages=MESSAGES, stop="A")
    request = server.engine.requests[-1]
    assert request.params.max_tokens == 512 - len(request.prompt_token_ids)
