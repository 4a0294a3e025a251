"""Requests of Ollama's API in the format of OpenAI's."""

from typing import Any

import pytest

from foreword.server.api.entry import Conversion
from foreword.server.api.ollama import convert_chat

USER = {"role": "user", "content": "x"}


def converted(**fields: object) -> dict[str, Any]:
    found = convert_chat({"model": "m", "messages": [USER], **fields})
    assert isinstance(found, Conversion)
    return found.body


@pytest.mark.parametrize(("option", "name"), [("num_predict", "max_tokens"), ("seed", "seed")])
def test_ollamas_numbers_for_no_limit_and_a_random_seed_are_left_out(option: str, name: str):
    for value in (-1, -2):
        assert name not in converted(options={option: value})
    assert converted(options={option: 7})[name] == 7
    assert converted(options={"top_k": -1})["top_k"] == -1


def test_results_answer_the_calls_of_their_name_or_else_the_first():
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "c")]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [{"role": "tool", "content": "r"} | named for named in ({"tool_name": "b"}, {}, {}, {})]
    messages = converted(messages=[said, *results])["messages"]
    ids = [call["id"] for call in messages[0]["tool_calls"]]
    assert [message["tool_call_id"] for message in messages[1:]] == [ids[1], ids[0], ids[2], "call"]
