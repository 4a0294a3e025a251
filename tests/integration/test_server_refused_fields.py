"""Fields that are not implemented: refused by name where they would change the answer, else ignored."""

import re

import httpx
import openai
import pytest

from foreword.drafters.config import SpeculationConfig
from foreword.server.api.bodies import LOGGED_FIELDS, IgnoredFieldLog, UnknownFields
from foreword.server.api.request_types import CompletionRequest
from foreword.server.settings import ServerSettings
from helpers.fake_engine import FakeEngine
from helpers.local_server import local_server

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tiny_model):
    settings = ServerSettings("tiny", speculation=SpeculationConfig.parse({"method": "ngram"}))
    with local_server(tiny_model, settings, FakeEngine(step_seconds=0.0005)) as running:
        yield running


@pytest.fixture(scope="module")
def strict_server(tiny_model):
    with local_server(tiny_model, ServerSettings("tiny", strict_fields=True), FakeEngine()) as running:
        yield running


@pytest.fixture
def client(server):
    return server.openai()


UNSUPPORTED = {
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "wav"},
    "web_search_options": {},
    "use_beam_search": True,
    "best_of": 4,
    "logits_processors": ["f"],
    "typical_p": 0.9,
    "options": {"num_predict": 5},
    "chat_template": "{{ x }}",
}
"""An answer that ignores one of these would not be what was requested."""

IGNORED = {
    "reasoning_effort": "high",
    "store": True,
    "service_tier": "priority",
    "verbosity": "low",
    "cache_salt": "x",
    "previous_response_id": "resp-1",  # on this route there are none
    "not_a_field": {"a": [1]},
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_what_would_change_the_answer_is_refused_by_name(server, client, field):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, extra_body={field: UNSUPPORTED[field]}
        )
    assert caught.value.param == field
    assert "not supported" in caught.value.message


def test_other_fields_are_ignored_and_named_in_a_header(server):
    with server.http() as http:
        body = {"messages": MESSAGES, "max_tokens": 1} | IGNORED
        for stream in (True, False):
            answer = http.post("/v1/chat/completions", json=body | {"stream": stream})
            assert answer.status_code == 200
            assert answer.headers["x-foreword-ignored-fields"] == ", ".join(IGNORED)
        refused = http.post("/v1/chat/completions", json=body | {"messages": []})
        assert "not_a_field" in refused.headers["x-foreword-ignored-fields"]
        plain = http.post("/v1/chat/completions", json={"messages": MESSAGES, "store": False, "zz": None})
        assert plain.status_code == 200
        assert "x-foreword-ignored-fields" not in plain.headers


def test_fields_inside_messages_and_tools_are_ignored_too(server):
    text = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    tool = {"type": "function", "function": {"name": "f", "zz": 1}, "cache_control": {}}
    messages = [{"role": "user", "content": [text], "id": "1"}, {"role": "user", "content": "y", "id": "2"}]
    body = {"messages": messages, "tools": [tool], "stream_options": {"zz": 1}, "max_tokens": 1}
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        assert set(answer.headers["x-foreword-ignored-fields"].split(", ")) == {
            "messages.id",
            "messages.content.cache_control",
            "tools.cache_control",
            "tools.function.zz",
            "stream_options.zz",
        }
        for message, param in (
            ({"role": "user", "content": "x", "images": ["x"]}, "messages.0.images"),
            ({"role": "assistant", "content": "x", "prefix": True}, "messages.0.prefix"),
        ):
            refused = http.post("/v1/chat/completions", json={"messages": [message]})
            assert refused.json()["error"]["param"] == param
        tool["function"] = {"name": "f", "input_schema": {}}
        refused = http.post("/v1/chat/completions", json=body)
        assert refused.json()["error"]["param"] == "tools.0.function.input_schema"


@pytest.mark.parametrize("route", ["/v1/completions", "/generate", "/tokenize"])
def test_a_mistyped_field_is_named_with_the_right_one(server, route, caplog):
    with server.http() as http, caplog.at_level("WARNING", logger="foreword.server"):
        for _ in range(2):
            answer = http.post(route, json={"prompt": "x", "add_special_token": True})
            assert answer.status_code == 200
            hint = "add_special_token (did you mean add_special_tokens?)"
            assert answer.headers["x-foreword-ignored-fields"] == hint
    assert sum(hint in record.getMessage() for record in caplog.records) <= 1  # of all routes


def test_a_field_is_logged_once_and_not_more_than_so_many(caplog):
    fields = IgnoredFieldLog()
    with caplog.at_level("WARNING", logger="foreword.server"):
        for number in range(2 * LOGGED_FIELDS):
            unknown = UnknownFields(is_strict=False)
            body = {f"field-{number}-{other}\r\n: x": 1 for other in range(50)} | {"x" * 5000: 1}
            assert unknown.take_declared(body, CompletionRequest) == {}
            header = fields.header(unknown)
            assert fields.header(unknown) == header  # the log has these already
            assert header.isprintable()
            assert header.endswith(", 43 more")
            assert len(header) < 1000
    assert len(caplog.records) == LOGGED_FIELDS


def test_a_field_with_a_number_for_a_name_is_named():
    unknown = UnknownFields(is_strict=False)
    unknown.take_declared({"5": 1, "1.2": 1, "": 1}, CompletionRequest)
    assert IgnoredFieldLog().header(unknown) == "5, 1.2, ?"


def test_fields_that_are_known_under_another_name_are_refused_with_it(server):
    with server.http() as http:
        for route, field, meant in (
            ("/v1/completions", "max_new_tokens", "max_tokens"),
            ("/v1/completions", "choice", "guided_choice"),
            ("/v1/chat/completions", "prompt", "messages"),
            ("/v1/responses", "max_tokens", "max_output_tokens"),
        ):
            own = (
                {"messages": MESSAGES}
                if "chat" in route
                else {"input": "x"}
                if "resp" in route
                else {"prompt": "x"}
            )
            error = http.post(route, json=own | {field: 5}).json()["error"]
            assert error["message"] == f"unknown field {field!r}; did you mean {meant}?"


def test_tools_and_messages_belong_to_the_chat_route(server):
    with server.http() as http:
        for route in ("/v1/completions", "/generate"):
            for field in ("tools", "messages"):
                error = http.post(route, json={"prompt": "x", field: [{}]}).json()["error"]
                assert error["param"] == field
                assert "/v1/chat/completions" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [*IGNORED.items(), ("temprature", 1), ("messages", [MESSAGES[0] | {"id": "1"}])],
)
def test_strict_fields_refuse_all_of_them(tiny_model, strict_server, field, value):
    with strict_server.http() as http:
        body = {"messages": MESSAGES, "max_tokens": 1}
        answer = http.post("/v1/chat/completions", json=body | {field: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == ("messages.0.id" if field == "messages" else field)
        assert http.post("/v1/chat/completions", json=body | {"store": False}).status_code == 200


def test_bodies_for_operators_are_always_strict(tiny_model):
    settings = ServerSettings("tiny", allow_switch=True)
    with local_server(tiny_model, settings, FakeEngine()) as server, server.http() as http:
        answer = http.post("/speculation", json={"enabled": False, "cohorts": ["code"]})
        assert answer.json()["error"]["message"] == "unknown field 'cohorts'; did you mean cohort?"
        assert server.client.speculating


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
        assert re.search("one of grammar, ngram, .*suffix.*; false is for no speculation", error["message"])
        error = http.post("/v1/completions", json={"prompt": "x", "speculation": 5}).json()["error"]
        assert 'such as {"method": "ngram"}' in error["message"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}], "part 1 is of type 'image_url'"),
        ([{"type": "input_audio", "input_audio": {}}], "part 0 is of type 'input_audio'"),
        ([{"type": "video_url", "video_url": {}}], "use a server with a vision model"),
        ([{"type": "refusal"}], "part 0 has no refusal"),
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


def test_a_refusal_that_a_client_sends_back_is_text(server, client):
    parts = [{"type": "refusal", "refusal": "No"}, {"type": "text", "text": "."}]
    for content in (parts, "No."):
        messages = [*MESSAGES, {"role": "assistant", "content": content}, *MESSAGES]
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    first, second = (request.prompt_token_ids for request in server.engine.requests[-2:])
    assert first == second


def test_a_prompt_that_does_not_fit_says_so(server, client):
    with pytest.raises(openai.BadRequestError, match="at most 511") as caught:
        client.completions.create(model="tiny", prompt=[5] * 512)
    assert caught.value.code == "context_length_exceeded"
    assert client.completions.create(model="tiny", prompt=[5] * 511).usage.completion_tokens == 1


LONG = "hello " * 600
ROUTES_AND_LENGTHS = (  # a route, and its fields of the prompt and of the answer's length
    ("/v1/completions", "prompt", "max_tokens"),
    ("/v1/chat/completions", "messages", "max_tokens"),
    ("/v1/chat/completions", "messages", "max_completion_tokens"),
    ("/v1/responses", "input", "max_output_tokens"),
    ("/generate", "prompt", "max_tokens"),
)


@pytest.mark.parametrize(("route", "prompt", "length"), ROUTES_AND_LENGTHS)
def test_what_does_not_fit_into_the_context_is_named_as_the_route_names_it(server, route, prompt, length):
    def error(text: str, **more: object) -> dict[str, str]:
        given = [{"role": "user", "content": text}] if prompt == "messages" else text
        with server.http() as http:
            answer = http.post(route, json={prompt: given, **more})
        assert answer.status_code == 400
        return answer.json()["error"]

    too_long = error(LONG)
    assert (too_long["param"], too_long["code"]) == (prompt, "context_length_exceeded")
    too_many = error("hello", **{length: 512})
    assert (too_many["param"], too_many["code"]) == (length, "context_length_exceeded")
    assert f": {length} can be at most " in too_many["message"]


@pytest.mark.parametrize(("route", "prompt"), [("/api/chat", "messages"), ("/api/generate", "prompt")])
def test_ollamas_names_are_given_too(server, route, prompt):
    given = [{"role": "user", "content": LONG}] if prompt == "messages" else LONG
    with server.http() as http:
        answer = http.post(route, json={"model": "tiny", prompt: given})
    assert answer.status_code == 400
    assert re.match(rf"(the )?{prompt}\b", answer.json()["error"])


def test_a_chat_without_max_tokens_may_fill_the_context(server, client):
    client.chat.completions.create(model="tiny", messages=MESSAGES, stop="A")
    request = server.engine.requests[-1]
    assert request.params.max_tokens == 512 - len(request.prompt_token_ids)
