"""Anthropic's official client against a server with a real engine and a random model."""

import json
from pathlib import Path

import pytest

from foreword.server.settings import Limits, ServerSettings
from helpers.fake_engine import FakeEngine
from helpers.local_server import LocalServer, local_server
from helpers.real_server import real_server, with_context

anthropic = pytest.importorskip(
    "anthropic", reason="Anthropic's client is not installed: pip install '.[dev]'"
)

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [{"name": "weather", "description": "How it is.", "input_schema": SCHEMA}]
MESSAGES = [{"role": "user", "content": "hello"}]
ASKED = {"model": "tiny", "max_tokens": 24, "messages": MESSAGES, "extra_body": {"seed": 3}}


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):
    model = with_context(tiny_model, tmp_path_factory.mktemp("wide"), 2048)
    with real_server(model, ServerSettings("tiny", limits=Limits(stops=2))) as running:
        yield running


def client_of(server: LocalServer, key: str = "unused") -> "anthropic.Anthropic":
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(server: LocalServer):
    return client_of(server)


def test_an_answer_is_the_chat_routes(server, client):
    said = client.messages.create(**ASKED)
    chat = server.openai().chat.completions.create(model="tiny", max_tokens=24, seed=3, messages=MESSAGES)
    (block,) = said.content
    assert (said.type, said.role, said.model, block.type) == ("message", "assistant", "tiny", "text")
    assert block.text == chat.choices[0].message.content
    assert (said.stop_reason, said.stop_sequence) == ("max_tokens", None)
    usage = said.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert usage.output_tokens == 24
    assert said.model_extra["speculation"]["method"] == "ngram"


def test_a_stream_has_anthropics_events_in_their_order(client):
    whole = client.messages.create(**ASKED)
    kinds, texts = [], []
    for event in client.messages.create(**ASKED, stream=True):
        kinds.append(event.type)
        if event.type == "content_block_delta":
            texts.append(event.delta.text)
        if event.type == "message_delta":
            assert event.delta.stop_reason == "max_tokens"
            assert event.usage.output_tokens == 24
    deltas = ["content_block_delta"] * len(texts)
    assert kinds == ["message_start", "content_block_start", *deltas, "content_block_stop", "message_delta",
                     "message_stop"]  # fmt: skip
    assert "".join(texts) == whole.content[0].text


def test_lines_of_a_stream_name_their_events(server):
    body = {"model": "tiny", "max_tokens": 3, "messages": MESSAGES, "stream": True}
    with server.http(**{"x-api-key": "k", "anthropic-version": "2023-06-01"}) as http:
        text = http.post("/v1/messages", json=body).text
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert "[DONE]" not in text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_is_called_streamed_or_not(client, choice):
    asked = {
        **ASKED,
        "max_tokens": 200,
        "tools": TOOLS,
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
    }
    said = client.messages.create(**asked)
    (call,) = [block for block in said.content if block.type == "tool_use"]
    assert said.stop_reason == "tool_use"
    assert call.name == "weather"
    assert set(call.input) == {"name", "age"}
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    (streamed,) = [block for block in final.content if block.type == "tool_use"]
    assert (streamed.name, streamed.input, final.stop_reason) == ("weather", call.input, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    after = [*MESSAGES, {"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**ASKED | {"messages": after, "tools": TOOLS}).usage.output_tokens == 24


def test_blocks_become_the_chat_routes_messages(server, client):
    blocks = [
        {"type": "text", "text": "hel", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "lo"},
    ]
    called = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"name": "Ann", "age": 3}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "fine", "is_error": False}
    messages = [
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": [{"type": "text", "text": "so"}, called]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    system = [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]
    counted = client.messages.count_tokens(model="tiny", messages=messages, system=system, tools=TOOLS)
    function = {"name": "weather", "description": "How it is.", "parameters": SCHEMA}
    call = {
        "id": "t1",
        "type": "function",
        "function": {"name": "weather", "arguments": json.dumps(called["input"])},
    }
    same = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "so", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "fine"},
        {"role": "user", "content": "and?"},
    ]
    chat = server.openai().chat.completions.create(
        model="tiny", messages=same, max_tokens=8, seed=3, tools=[{"type": "function", "function": function}]
    )
    said = client.messages.create(
        **ASKED | {"messages": messages, "system": system, "tools": TOOLS, "max_tokens": 8}
    )
    assert counted.input_tokens == chat.usage.prompt_tokens
    assert said.content[0].text == chat.choices[0].message.content


def test_an_empty_list_of_tools_and_an_empty_beginning_of_the_answer_change_nothing(client):
    expected = client.messages.create(**ASKED).content[0].text
    assert client.messages.create(**ASKED, tools=[]).content[0].text == expected
    empty = {"role": "assistant", "content": [{"type": "text", "text": ""}]}
    assert client.messages.create(**ASKED | {"messages": [*MESSAGES, empty]}).content


def test_errors_of_counted_conversations_name_the_field(server):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"model": "tiny", "messages": MESSAGES, "thinking": thinking}
    with server.http() as http:
        said = http.post("/v1/messages/count_tokens", json=body)
    assert said.status_code == 400
    assert said.json()["error"]["message"].startswith("thinking.budget_tokens: ")


def test_an_answer_goes_on_where_the_last_message_ends(server, client):
    begun = [*MESSAGES, {"role": "assistant", "content": "The answer is"}]
    chat = server.openai().chat.completions.create(
        model="tiny", messages=begun, max_tokens=24, seed=3, extra_body={"continue_final_message": True}
    )
    assert (
        client.messages.create(**ASKED | {"messages": begun}).content[0].text
        == chat.choices[0].message.content
    )


def test_a_stop_sequence_is_named(client):
    text = client.messages.create(**ASKED).content[0].text
    stop = text[5:7]
    said = client.messages.create(**ASKED, stop_sequences=[stop])
    assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", stop)
    assert said.content[0].text == text[: text.index(stop)]


def test_a_schema_is_kept(client):
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    said = client.messages.create(
        **ASKED | {"max_tokens": 60, "extra_body": {"seed": 1, "output_config": form}}
    )
    assert set(json.loads(said.content[0].text)) == {"name", "age"}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages: must be a list that is not empty"),
        ({"messages": [1]}, "messages.0: must be an object"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages.0.role: "),
        ({"messages": [{"role": "bot", "content": "x"}], "system": "be kind"}, "messages.0.role: "),
        ({"messages": [{"role": "user"}]}, "messages.0: content is missing"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content: "),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0: is of type 'image'; this server "
         "takes text only: send a description of it, or use a server with a vision model"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
         "messages.0.content.0.tool_use_id: must be a text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "", "input": {}}]}]},
         "messages.0.content.0.name: "),
        ({"system": [IMAGE]}, "system.0: is of type 'image'"),
        ({"max_tokens": None}, "max_tokens: is missing"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"temperature": 3}, "temperature: "),
        ({"stop_sequences": [""]}, "stop_sequences.0: "),
        ({"stop_sequences": ["a", "b", "c"]}, "stop_sequences: number of stops is 3"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name: "),
        ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "tools.0.input_schema: "),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0.type: the server runs no built-in tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: there are no tools"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": "false"}},
         "tool_choice.disable_parallel_tool_use: must be true or false"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type: must be auto, any, tool or none"),
        ({"tool_choice": {"type": {}}}, "tool_choice.type: must be auto, any, tool or none"),
        ({"thinking": {"type": "on"}}, "thinking.type: "),
        ({"n": 2}, "n: this API has one answer"),
    ],
)  # fmt: skip
def test_an_error_is_one_line_that_names_the_field(server, fields, words: str):
    body = {"model": "tiny", "max_tokens": 4, "messages": MESSAGES} | fields
    with server.http() as http:
        answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    told = answer.json()
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert told["error"]["message"].startswith(words)
    assert "\n" not in told["error"]["message"]


def test_errors_are_the_clients_exceptions(tiny_model, client):
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'claude'"):
        client.messages.create(**ASKED | {"model": "claude"})
    with (
        local_server(tiny_model, ServerSettings("tiny", api_keys=("secret",)), FakeEngine()) as locked,
        pytest.raises(anthropic.AuthenticationError, match="give this server's API key"),
    ):
        client_of(locked, "wrong").messages.create(**ASKED)
    with local_server(tiny_model, ServerSettings("tiny", api_keys=("secret",)), FakeEngine()) as locked:
        assert client_of(locked, "secret").messages.create(**ASKED).usage.output_tokens == 24


def test_a_failure_within_a_stream_is_an_event_of_its_own_shape(tiny_model):
    engine = FakeEngine(step_seconds=0.01)
    with local_server(tiny_model, ServerSettings("tiny"), engine) as server:
        stream = client_of(server).messages.create(**ASKED | {"max_tokens": 400}, stream=True)
        next(iter(stream))
        server.call(lambda: engine.abort(engine.requests[-1].request_id))
        with pytest.raises(
            anthropic.APIStatusError, match="the server stopped before the answer was finished"
        ):
            list(stream)


def test_models_have_anthropics_format(server, client):
    (model,) = client.models.list().data
    assert (model.id, model.type, model.display_name, model.lifecycle) == ("tiny", "model", "tiny", "active")
    assert model.max_input_tokens == 2048
    assert client.models.retrieve("tiny").created_at.timestamp() == server.context.started_at
    assert "display_name" not in server.openai().models.retrieve("tiny").model_dump()


def test_tools_of_other_servers_are_refused_and_an_effort_is_named_as_ignored(client):
    server = {"type": "url", "url": "http://tools.example", "name": "tools"}
    with pytest.raises(
        anthropic.BadRequestError, match="mcp_servers: is not supported by this server: it calls no"
    ):
        client.beta.messages.create(**ASKED, mcp_servers=[server])
    assert client.beta.messages.create(**ASKED, mcp_servers=[]).content
    told = client.messages.with_raw_response.create(**ASKED, output_config={"effort": "high"})
    assert told.headers["x-foreword-ignored-fields"] == "reasoning_effort"
