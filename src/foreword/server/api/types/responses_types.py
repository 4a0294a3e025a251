"""The body of `POST /v1/responses`: OpenAI's newest form, text in and out, without anything kept."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, WithJsonSchema

from foreword.errors import RequestError, in_plain_words
from foreword.server.api.types.foreign_fields import RESPONSES, Fields
from foreword.server.api.types.message_types import Message
from foreword.server.api.types.sampling_types import SamplingFields
from foreword.server.api.types.tool_types import Tool, ToolChoice, ToolFunction
from foreword.structured.params import StructuredOutputs

Part = TypeVar("Part", bound=BaseModel)

_TEXT_PARTS = ("input_text", "output_text", "text")


def _messages(value: object) -> list[Message]:
    """A text, or a list of messages, calls of tools and what they gave."""
    if isinstance(value, str):
        return [_said("user", value)]
    if not isinstance(value, list):
        raise ValueError("must be a text or a list of items")
    if not value:
        raise ValueError("must not be empty")
    return [_message(place, item) for place, item in enumerate(value)]


def _message(place: int, item: object) -> Message:
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if not isinstance(item, Mapping) or kind not in ("message", "function_call", "function_call_output"):
        named = f"of type {str(kind)[:32]!r}" if isinstance(item, Mapping) else "no object"
        raise ValueError(f"item {place} is {named}; use message, function_call or function_call_output")
    try:
        if kind == "function_call":
            called = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "function": called}
            return _read(Message, {"role": "assistant", "tool_calls": [call]})
        if kind == "function_call_output":
            text = _text(place, item["output"])
            return _read(Message, {"role": "tool", "tool_call_id": item["call_id"], "content": text})
        return _said(item["role"], _text(place, item["content"]))
    except KeyError as error:
        raise ValueError(f"item {place} has no {error.args[0]}") from None


def _said(role: object, text: str) -> Message:
    return _read(Message, {"role": role, "content": text})


def _read(model: type[Part], value: object) -> Part:
    """As `model`; what does not fit is one line, to be read after the field's name."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {in_plain_words(first['msg'])}" if place else first["msg"]) from None


def _text(place: int, content: object) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [None]:
        if not isinstance(part, Mapping) or part.get("type") not in _TEXT_PARTS:
            raise ValueError(f"item {place} has something besides text; this server takes text only")
        texts.append(str(part.get("text", "")))
    return "".join(texts)


def _tools(value: object) -> list[Tool] | None:
    """Functions, which have their fields on top here."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError("must be a list")
    found = []
    for tool in value:
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise ValueError("only tools of type function are supported")
        rest = {key: entry for key, entry in tool.items() if key != "type"}
        found.append(Tool(type="function", function=_read(ToolFunction, rest)))
    return found


def _choice(value: object) -> object:
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        return {"type": value.get("type"), "function": {"name": value["name"]}}
    return value


def _text_format(value: object) -> StructuredOutputs | None:
    """`{"format": {"type": "json_schema", "name": ..., "schema": ...}}`"""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    given = value.get("format", {"type": "text"})
    if not isinstance(given, dict):
        raise ValueError("format must be an object")
    kind = given.get("type")
    try:
        if kind == "json_object":
            return StructuredOutputs(json_object=True)
        if kind == "json_schema":
            return StructuredOutputs(json=given["schema"])
    except KeyError:
        raise ValueError("format has no schema") from None
    except RequestError as error:
        raise ValueError(str(error)) from None
    if kind != "text":
        raise ValueError("format must be of type text, json_object or json_schema")
    return None


_ANY = WithJsonSchema({})
_OBJECT = WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})


class ResponsesRequest(SamplingFields):
    """`POST /v1/responses`."""

    foreign: ClassVar[Fields] = RESPONSES

    model: str | None = Field(None, max_length=512)
    input: Annotated[Any, BeforeValidator(_messages), _ANY]
    instructions: str | None = None  # a system message before all others
    max_output_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    text: Annotated[Any, BeforeValidator(_text_format), _OBJECT] = None
    tools: Annotated[Any, BeforeValidator(_tools), _ANY] = None
    tool_choice: Annotated[ToolChoice, BeforeValidator(_choice), _ANY] = None
    parallel_tool_calls: bool | None = None
    user: str | None = Field(None, max_length=4096)  # accepted, not used
    safety_identifier: str | None = Field(None, max_length=4096)  # accepted, not used
    prompt_cache_key: str | None = Field(None, max_length=4096)  # accepted; the API key decides

    def messages(self) -> list[Message]:
        """The conversation."""
        first = [] if self.instructions is None else [_said("system", self.instructions)]
        return [*first, *self.input]
