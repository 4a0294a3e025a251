"""The input and tools of `/v1/responses`, converted to those of the chat route."""

from collections.abc import Mapping
from typing import Any

from foreword.server.api.message_types import (
    NAMED_TOOL,
    Message,
    Tool,
    ToolFunction,
    text_message,
    unsupported_part_text,
    validated,
)

_KINDS = ("message", "reasoning", "function_call", "function_call_output")
_ITEM_FIELDS = {
    "tool_calls.0.id": "call_id",
    "tool_calls.0.function.name": "name",
    "tool_calls.0.function.arguments": "arguments",
    "tool_call_id": "call_id",
}
"""Field of a chat message -> field of the item that it was converted from, where the names differ."""

_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Type of a part -> the part's field with the text."""


def item_messages(value: object) -> list[Message]:
    """Return the messages of the input: a string, or a list of messages, reasoning, tool calls and tool results.

    Reasoning, text and calls of one answer become one message of the assistant, as on the chat route.
    """
    if isinstance(value, str):
        return [text_message("user", value)]
    if not isinstance(value, list):
        raise ValueError("must be a text or a list of items")
    if not value:
        raise ValueError("must not be empty")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(value):
        message = _item_message(index, item)
        if not (messages and _continues(messages[-1], message)):
            messages.append(message)
            continue
        calls = messages[-1].get("tool_calls", []) + message.pop("tool_calls", [])
        messages[-1] |= message
        if calls:
            messages[-1]["tool_calls"] = calls
    return [validated(Message, {"content": "", **message}) for message in messages]


def _continues(earlier: dict[str, Any], message: dict[str, Any]) -> bool:
    """Whether a message continues the assistant's earlier one: text after reasoning, or calls after either."""
    if not earlier["role"] == message["role"] == "assistant" or "reasoning_content" in message:
        return False
    return "content" not in message or not ("content" in earlier or "tool_calls" in earlier)


def _item_message(index: int, item: object) -> dict[str, Any]:
    """Return an item as a chat message, or as a part of one; raise `ValueError` for an invalid item."""
    if not isinstance(item, Mapping):
        raise ValueError(f"item {index} is not an object; use message, function_call or function_call_output")
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in _KINDS:
        what = f"is of type {kind[:32]!r}" if isinstance(kind, str) else "has a type that is not a text"
        raise ValueError(f"item {index} {what}; use message, function_call or function_call_output")
    try:
        if kind == "reasoning":
            return {"role": "assistant", "reasoning_content": _reasoning_text(index, item.get("content"))}
        if kind == "function_call_output" and not item["call_id"]:
            raise ValueError(f"item {index} has no call_id")
        if kind == "function_call":
            called = {"name": item["name"], "arguments": item["arguments"]}
            message = {"role": "assistant", "tool_calls": [{"id": item["call_id"], "function": called}]}
        elif kind == "function_call_output":
            text = _item_text(index, item["output"])
            message = {"role": "tool", "tool_call_id": item["call_id"], "content": text}
        else:
            message = {"role": item["role"], "content": _item_text(index, item["content"])}
    except KeyError as error:
        raise ValueError(f"item {index} has no {error.args[0]}") from None
    try:
        validated(Message, message)
    except ValueError as error:
        path, colon, complaint = str(error).partition(": ")
        raise ValueError(f"item {index}: {_ITEM_FIELDS.get(path, path)}{colon}{complaint}") from None
    return message


def _reasoning_text(index: int, content: object) -> str:
    """Return the text of a reasoning item; empty if the server that created the item does not show reasoning."""
    parts = content if isinstance(content, list) else []
    return "".join(_part_text(index, part, "text") for part in parts if isinstance(part, Mapping))


def _item_text(index: int, content: object) -> str:
    """Return the text of an item's content: a string, or a list of text parts."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [None]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in _TEXT_PARTS:
            that_is = "" if isinstance(kind, str) else "that is "
            raise ValueError(f"item {index} has a part {that_is}{unsupported_part_text(kind)}")
        texts.append(_part_text(index, part, _TEXT_PARTS[kind]))
    return "".join(texts)


def _part_text(index: int, part: Mapping[str, object], name: str) -> str:
    text = part.get(name, "")
    if not isinstance(text, str):
        raise ValueError(f"item {index} has a part whose {name} is not a text")
    return text


def flat_tools(value: object) -> list[Tool] | None:
    """Parse the tools of `/v1/responses`, which have the function's fields beside `type`."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError("must be a list")
    tools = []
    for index, tool in enumerate(value):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise ValueError(f"tool {index} is of another type; only tools of type function are supported")
        function = {key: entry for key, entry in tool.items() if key != "type"}
        try:
            tools.append(Tool(type="function", function=validated(ToolFunction, function)))
        except ValueError as error:
            raise ValueError(f"tool {index}: {error}") from None
    return tools


def flat_choice(value: object) -> object:
    """Convert a named tool choice of `/v1/responses`, which has `name` beside `type`, to the chat route's format."""
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        return {"type": value.get("type"), "function": {"name": value["name"]}}
    is_nested = isinstance(value, dict) and isinstance(value.get("function"), dict)  # the chat route's format
    if value is not None and not is_nested and value not in ("none", "auto", "required"):
        raise ValueError('must be "none", "auto", "required" or {"type": "function", "name": ...}')
    return value


def responses_tool_choice(choice: str | None) -> str | dict[str, str]:
    """Return a tool choice in the format of `/v1/responses`."""
    if choice is not None and choice.startswith(NAMED_TOOL):
        return {"type": "function", "name": choice.removeprefix(NAMED_TOOL)}
    return choice or "auto"
