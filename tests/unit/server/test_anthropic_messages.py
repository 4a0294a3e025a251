from typing import Any

from foreword.server.api.anthropic import convert

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
