"""Messages of odd types: every API refuses them in one line that names the field, and none fails."""

from typing import Any

import pytest

from foreword.server.settings import ServerSettings
from helpers.fake_engine import FakeEngine
from helpers.local_server import local_server

FIELD = dict.fromkeys(("/v1/chat/completions", "/v1/messages", "/api/chat"), "messages") | {
    "/v1/responses": "input"
}
BASE = {"model": "tiny", "stream": False}
MOST = {"/api/chat": {"options": {"num_predict": 1}}, "/v1/responses": {"max_output_tokens": 16}}

ODD: list[Any] = [5, -1.5, True, {}, {"role": "user", "content": "x"}]
ODD += [
    [one]
    for one in (None, 5, "x", [], {}, {"content": "x"}, {"role": "user"}, {"role": None, "content": "x"})
]
ODD += [[{"role": role, "content": "x"}] for role in (5, [], {}, ["user"], "", "bot")]
ODD += [[{"role": "user", "content": content}] for content in (5, 1.5, False, {}, {"type": "text"})]
ODD += [
    [{"role": "user", "content": [part]}]
    for part in (
        None,
        5,
        "x",
        [],
        {},
        {"type": None},
        {"type": 5},
        {"type": ["text"]},
        {"type": "text", "text": 5},
    )
]
"""Values of the field with the messages."""

CALLS: dict[str, list[tuple[Any, str]]] = {
    "/v1/chat/completions": [
        ([{"role": "assistant", "tool_calls": 5}], "messages.0.tool_calls: must be a list"),
        ([{"role": "tool", "tool_call_id": {}, "content": "x"}], "messages.0.tool_call_id: must be a text"),
    ],
    "/v1/messages": [
        (
            [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "", "content": "x"}]}],
            "messages.0.content.0.tool_use_id: must not be empty",
        ),
        (
            [{"role": "assistant", "content": [{"type": "tool_use", "id": 5, "name": "f", "input": {}}]}],
            "messages.0.content.0.id: must be a text",
        ),
    ],
    "/api/chat": [
        ([{"role": "assistant", "content": "x", "thinking": 5}], "messages.0.thinking: must be a text"),
        ([{"role": "tool", "content": "x", "tool_name": []}], "messages.0.tool_name: must be a text"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}],
            "messages.0.tool_calls.0.function.name: must be a text",
        ),
    ],
    "/v1/responses": [
        (
            [{"type": "function_call", "call_id": 5, "name": "f", "arguments": "{}"}],
            "input: item 0: call_id: must be a text",
        ),
        ([{"type": None}], "input: item 0 has a type that is not a text; use message, function_call or "
         "function_call_output"),
    ],
}  # fmt: skip
FIELDS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "/v1/messages": [
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: must be a text"),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_config.format.schema: must be an object",
        ),
    ],
    "/v1/responses": [
        (
            {"tool_choice": {"type": "function"}},
            'tool_choice: must be "none", "auto", "required" or {"type": "function", "name": ...}',
        ),
        ({"tools": [{"type": "function", "name": 5}]}, "tools: tool 0: name: must be a text"),
    ],
}


@pytest.fixture(scope="module")
def client(tiny_model):
    with local_server(tiny_model, ServerSettings("tiny"), FakeEngine()) as server, server.http() as made:
        yield made


def complaint(client, route: str, fields: dict[str, Any]) -> str:
    answer = client.post(route, json=BASE | MOST.get(route, {"max_tokens": 1}) | fields)
    assert answer.status_code == 400, (route, fields, answer.text[:300])
    error = answer.json()["error"]
    return error if isinstance(error, str) else error["message"]


@pytest.mark.parametrize("route", FIELD)
def test_odd_messages_are_refused_by_their_field(client, route: str):
    name = FIELD[route]
    for value in ODD:
        line = complaint(client, route, {name: value})
        assert line.startswith((f"{name}:", f"{name}.0")), (value, line)
        assert "\n" not in line
        assert len(line) < 200
        assert not any(word in line for word in ("nput should", "Value error", "Field required", "NoneType"))


@pytest.mark.parametrize("route", FIELD)
def test_the_field_has_the_apis_own_name(client, route: str):
    for value, line in CALLS[route]:
        assert complaint(client, route, {FIELD[route]: value}) == line
    for fields, line in FIELDS.get(route, []):
        assert complaint(client, route, {FIELD[route]: [{"role": "user", "content": "x"}]} | fields) == line


def test_no_text_is_made_of_what_is_none(client):
    for text in (None, 5, ["x"]):
        items = [{"role": "user", "content": [{"type": "input_text", "text": text}]}]
        assert (
            complaint(client, "/v1/responses", {"input": items})
            == "input: item 0 has a part whose text is not a text"
        )
