"""A body read without a server: the same traits that the engine sees, the same refusals as the server's."""

import json
from dataclasses import replace
from typing import Any

import pytest

from foreword.control.policy_file.matching import RequestTraits
from foreword.drafters.config import SpeculationConfig
from foreword.errors import ForewordError
from foreword.server.api.offline import OfflineRequest, read_offline
from foreword.server.settings import Limits, ServerSettings

SETTINGS = ServerSettings("m")
MESSAGE = {"role": "user", "content": "x" * 400}
TOOL = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}}


def read(body: dict[str, Any], settings: ServerSettings = SETTINGS, **more: Any) -> OfflineRequest:
    return read_offline(json.dumps(body).encode(), settings, **more)


def test_every_field_that_a_rule_matches():
    body = {"prompt": [1, 2, 3], "temperature": 0, "metadata": {"task": "code"}, "stream": True, "model": "m"}
    found = read(body | {"priority": 3, "speculation": "ngram"}, tenant="t", adapter="sql")
    assert found.traits == RequestTraits("t", "m", "sql", 0.0, 3, False, True, "3", {"task": "code"})
    assert found.speculation == {"method": "ngram"}
    assert found.notes == []


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1], "guided_regex": "a"},
        {"messages": [MESSAGE], "response_format": {"type": "json_object"}},
        {"messages": [MESSAGE], "tools": [TOOL]},
        {"input": "x", "text": {"format": {"type": "json_object"}}},
    ],
)
def test_any_response_format_counts(body: dict[str, Any]):
    assert read(body).traits.json_schema


def test_what_is_assumed_is_noted():
    found = read({"messages": [MESSAGE]})
    assert (found.traits.temperature, found.traits.prompt_tokens, len(found.notes)) == (1.0, 100, 2)
    assert read({"messages": [MESSAGE]}, prompt_tokens=7).traits.prompt_tokens == 7
    several = read({"prompt": [[1], [2, 3]], "temperature": 1})
    assert several.notes == ["the first of 2 prompts is explained"]


def test_the_fields_select_the_route():
    assert read({"prompt": "x", "raw": True}).speculation is None
    assert "the server ignores raw" in read({"prompt": "x", "raw": True}, route="/v1/completions").notes
    with pytest.raises(ForewordError, match="input: must not be empty"):
        read({"input": []})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "x", "temperature": 2.5}, "temperature: must be at most 2"),
        ({"prompt": "x", "n": 17}, "n is 17; this server takes at most 16"),
        ({"prompt": "x", "min_tokens": 20}, "min_tokens"),
        (
            {"prompt": "x", "speculation": {"method": "eagle3"}},
            "method must be one of grammar, ngram, ",
        ),
        ({"messages": [MESSAGE], "tool_choice": "required"}, "tool_choice: there are no tools"),
        ({"messages": [MESSAGE] * 1025}, "at most 1024 messages"),
        ({"prompt": "x", "guided_regex": "a", "grammar": "b"}, "both set the response format"),
    ],
)
def test_what_the_server_refuses_is_refused(body: dict[str, Any], message: str):
    with pytest.raises(ForewordError, match=message):
        read(body)


def test_the_server_s_own_settings_count():
    config = SpeculationConfig.parse({"method": ["ngram", "suffix"]})
    body = {"prompt": "x", "speculation": {"method": ["ngram", "suffix"]}}
    assert read(body, replace(SETTINGS, speculation=config)).speculation == body["speculation"]
    with pytest.raises(ForewordError, match="method must be one of"):
        read(body)
    with pytest.raises(ForewordError, match="longer than 8 bytes"):
        read(body, replace(SETTINGS, limits=Limits(body_bytes=8)))
