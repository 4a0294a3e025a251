"""Messages and tools of a conversation."""

import json
import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from foreword.errors import in_plain_words
from foreword.server.api.foreign_fields import MESSAGE, TOOL_FUNCTION, Fields
from foreword.server.api.sampling_types import OpenPart


class TextPart(OpenPart):
    """A text part of a message. Other parts are refused, since this server processes only text."""

    type: Literal["text"]
    text: str


_ADVICE = {
    "image": "send a description of it, or use a server with a vision model",
    "video": "send a description of it, or use a server with a vision model",
    "audio": "send a transcript of it",
    "file": "send the text in it",
    "document": "send the text in it",
}
"""Advice for non-text parts, by words in their type names."""


def unsupported_part_text(kind: object) -> str:
    """Return the part of an error message after "is", for a content part of an unsupported type."""
    if not isinstance(kind, str):
        return "no object with a type; this server takes parts of type text"
    advice = next((text for name, text in _ADVICE.items() if name in kind), "send text")
    return f"of type {kind[:32]!r}; this server takes text only: {advice}"


def _text_parts(value: object) -> object:
    """Check a message's content before pydantic does: its errors would name the members of the union."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a text or a list of text parts")
    return [_text_part(index, part) for index, part in enumerate(value)]


def _text_part(index: int, part: object) -> dict[str, Any]:
    """Return a checked part. OpenAI's clients send a refusal back as a part of type refusal, which becomes text."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in ("text", "refusal"):
        raise ValueError(f"part {index} is {unsupported_part_text(kind)}")
    if not isinstance(part.get(kind), str):
        raise ValueError(f"part {index} has no {kind}")
    return {"type": "text", "text": part["refusal"]} if kind == "refusal" else part


TextContent = Annotated[str | Annotated[list[TextPart], Field(fail_fast=True)], BeforeValidator(_text_parts)]
"""A string, or text parts, as in OpenAI's API."""


def content_text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class CalledFunction(OpenPart):
    """A called function and its arguments."""

    name: str = Field(min_length=1, max_length=256)
    arguments: str  # a JSON object

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, value: str) -> str:
        try:
            given = json.loads(value or "{}")
        except (ValueError, RecursionError):
            raise ValueError("must be JSON") from None
        if not isinstance(given, dict):
            raise ValueError("must be a JSON object")
        return value


class MessageToolCall(OpenPart):
    """A tool call in an earlier answer."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(OpenPart):
    """One message of a conversation."""

    foreign: ClassVar[Fields] = MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextContent | None = None
    reasoning_content: str | None = None  # of an earlier answer, for templates that include it
    name: str | None = Field(None, max_length=256)  # in a tool's message, the tool; otherwise ignored
    tool_call_id: str | None = Field(None, max_length=256)  # in a tool's message, the call that it answers
    # OpenAI's client sends these back with earlier answers.
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True, max_length=128)] | None = None

    @model_validator(mode="after")
    def _check_content(self) -> "Message":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to the assistant")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("tool_call_id is missing: a tool's message says which call it answers")
        return self

    @property
    def text(self) -> str:
        return "" if self.content is None else content_text(self.content)

    @property
    def calls(self) -> list[tuple[str, Any]]:
        """(name, arguments) of the called tools."""
        functions = [call.function for call in self.tool_calls or ()]
        return [(function.name, json.loads(function.arguments or "{}")) for function in functions]

    def for_template(self) -> dict[str, Any]:
        """Return the message for a chat template; the role `developer` becomes `system`."""
        shown: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        if self.reasoning_content:
            shown["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            shown["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": name, "arguments": given}}
                for call, (name, given) in zip(self.tool_calls, self.calls, strict=True)
            ]
        if self.role == "tool":
            shown |= {"tool_call_id": self.tool_call_id, "name": self.name or ""}
        return shown


_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def _checked_name(value: object) -> object:
    if isinstance(value, str) and not _NAME.fullmatch(value):
        raise ValueError("must be 1 to 64 letters, digits, underscores and hyphens")
    return value


def _checked_parameters(value: object) -> object:
    """Check that parameters are a JSON schema of an object."""
    if isinstance(value, dict) and value.get("type", "object") != "object":
        raise ValueError('must be a JSON schema of type "object"')
    return value


class ToolFunction(OpenPart):
    """A function that the model may call."""

    foreign: ClassVar[Fields] = TOOL_FUNCTION

    name: Annotated[str, BeforeValidator(_checked_name)]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, BeforeValidator(_checked_parameters)] = None
    strict: bool | None = None  # True: a grammar enforces the schema even if calling a tool is optional

    @property
    def argument_schema(self) -> dict[str, Any]:
        if not self.parameters:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}

    def for_template(self) -> dict[str, Any]:
        shown = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {key: value for key, value in shown.items() if value is not None}


class Tool(OpenPart):
    """A tool of a request."""

    type: Literal["function"]
    function: ToolFunction


def _checked_choice(value: object) -> str | None:
    """Return "none", "auto", "required", "function/NAME" for a named tool, or None."""
    if value is None or value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ValueError(
            'must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
        )
    return NAMED_TOOL + name


NAMED_TOOL = "function/"
"""Prefix of a tool choice that names a tool."""

ToolChoice = Annotated[
    str | None,
    BeforeValidator(_checked_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required", None]}, {"type": "object"}]}),
]


Part = TypeVar("Part", bound=BaseModel)


def text_message(role: object, text: str) -> Message:
    return validated(Message, {"role": role, "content": text})


def validated(model: type[Part], value: object) -> Part:
    """Validate a value as `model`; raise `ValueError` with the first error in one line."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(map(str, first["loc"]))
        complaint = in_plain_words(first["msg"])
        raise ValueError(f"{path}: {complaint}" if path else complaint) from None
