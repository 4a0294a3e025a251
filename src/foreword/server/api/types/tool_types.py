"""Tools as OpenAI's routes describe them."""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, WithJsonSchema

from foreword.server.api.types.foreign_fields import TOOL_FUNCTION, Fields
from foreword.server.api.types.sampling_types import OpenPart

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def _checked_name(value: object) -> object:
    if isinstance(value, str) and not _NAME.fullmatch(value):
        raise ValueError("must be 1 to 64 letters, digits, underscores and hyphens")
    return value


def _checked_parameters(value: object) -> object:
    """A JSON schema of an object, which is what arguments are."""
    if isinstance(value, dict) and value.get("type", "object") != "object":
        raise ValueError('must be a JSON schema of type "object"')
    return value


class ToolFunction(OpenPart):
    """What a model may call."""

    foreign: ClassVar[Fields] = TOOL_FUNCTION

    name: Annotated[str, BeforeValidator(_checked_name)]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, BeforeValidator(_checked_parameters)] = None
    strict: bool | None = None  # calls fit the schema even where the model may choose not to call

    @property
    def argument_schema(self) -> dict[str, Any]:
        """Of its arguments; none where it names none."""
        if not self.parameters:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}

    def as_template_sees_it(self) -> dict[str, Any]:
        shown = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {key: value for key, value in shown.items() if value is not None}


class Tool(OpenPart):
    """One of a request's tools."""

    type: Literal["function"]
    function: ToolFunction


def written_choice(choice: str | None) -> str | dict[str, str]:
    """As `/v1/responses` has it."""
    if choice is not None and choice.startswith(NAMED):
        return {"type": "function", "name": choice.removeprefix(NAMED)}
    return choice or "auto"


def _checked_choice(value: object) -> str | None:
    """`none`, `auto`, `required`, or the name of a function behind a slash, which no other choice has."""
    if value is None or value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ValueError(
            'must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
        )
    return NAMED + name


NAMED = "function/"

ToolChoice = Annotated[
    str | None,
    BeforeValidator(_checked_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required", None]}, {"type": "object"}]}),
]
