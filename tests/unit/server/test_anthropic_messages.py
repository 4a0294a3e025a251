from typing import Any

from foreword.server.api.answer_types import AnswerUsage
from foreword.server.api.anthropic import _usage, convert

THINKING = {"type": "thinking", "thinking": "hm", "signature": ""}
CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "1"}


def converted(*messages: tuple[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    listed = [{"role": role, "content": content} for role, content in messages]
    found: list[dict[str, Any]] = convert({"model": "m", "max_tokens": 1, "messages": listed}).body[
        "messages"
    ]
    return found


def test_reasoning_after_a_tool_result_is_a_message():
    messages = converted(
        ("user", [RESULT]), ("assistant", [THINKING]), ("user", [{"type": "text", "text": "so?"}])
    )
    assert [message["role"] for message in messages] == ["tool", "assistant", "user"]
    assert messages[1]["reasoning_content"] == "hm"


def test_a_call_before_a_result_in_one_message_comes_before_it():
    messages = converted(("assistant", [CALL, RESULT]), ("user", [{"type": "text", "text": "so?"}]))
    assert [message["role"] for message in messages] == ["assistant", "tool", "user"]
    assert messages[0]["tool_calls"][0]["id"] == "a"


def test_two_pieces_of_reasoning_are_one():
    (message,) = converted(("assistant", [THINKING, {"type": "redacted_thinking"}, THINKING]))
    assert message["reasoning_content"] == "hmhm"


def test_cached_tokens_are_not_input_tokens_as_in_anthropics_usage():
    usage = _usage(AnswerUsage(20, 3, 23, {"cached_tokens": 16}))
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (4, 16, 3)
    assert _usage(AnswerUsage(20, 3, 23))["input_tokens"] == 20
