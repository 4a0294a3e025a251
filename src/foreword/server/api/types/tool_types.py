"""Tools as OpenAI's routes describe them."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from foreword.server.api.types.sampling_types import StrictBody


class ToolFunction(StrictBody):
    """What a model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema of its arguments
    strict: bool | None = None  # calls fit the schema even where the model may choose not to call

    @property
    def argument_schema(self) -> dict[str, Any]:
        """Of its arguments; none where it names none."""
        return self.parameters or {"type": "object", "properties": {}, "additionalProperties": False}

    def as_template_sees_it(self) -> dict[str, Any]:
        shown = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {key: value for key, value in shown.items() if value is not None}


class Tool(StrictBody):
    """One of a request's tools."""

    type: Literal["function"]
    function: ToolFunction


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
