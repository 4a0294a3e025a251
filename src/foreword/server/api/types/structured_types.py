"""The form of an answer as clients ask for it: OpenAI's, vLLM's and llama.cpp's words for the same."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema

from foreword.errors import RequestError
from foreword.server.errors import ApiError
from foreword.structured.params import StructuredOutputs

_FORMATS = "text, json_object, json_schema or structural_tag"


def _as_form(make: Callable[[Any], StructuredOutputs | None]) -> BeforeValidator:
    def check(value: object) -> StructuredOutputs | None:
        if value is None or isinstance(value, StructuredOutputs):
            return value
        try:
            return make(value)
        except RequestError as error:
            raise ValueError(str(error).removeprefix("structured outputs: ")) from None

    return BeforeValidator(check)


def _response_format(value: object) -> StructuredOutputs | None:
    """OpenAI's; `{"type": "json_object", "schema": ...}` is llama.cpp's, `structural_tag` is vLLM's."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(kind, str):
        raise RequestError(f"must be an object whose type is {_FORMATS}")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")
        return StructuredOutputs(json_object=True) if schema is None else StructuredOutputs(json=schema)
    if kind == "json_schema":
        return _json_schema(value.get("json_schema"))
    if kind == "structural_tag":
        return StructuredOutputs(structural_tag={key: part for key, part in value.items() if key != "type"})
    raise RequestError(f"type {kind[:32]!r} is not supported; use {_FORMATS}")


def _json_schema(given: object) -> StructuredOutputs:
    if not isinstance(given, dict) or not isinstance(given.get("schema"), dict):
        raise RequestError("json_schema must be an object with a schema")
    if other := given.keys() - {"name", "description", "schema", "strict"}:
        raise RequestError(f"json_schema has {min(other)[:32]!r}, which is not known here; leave it out")
    if given.get("strict") not in (None, True, False):
        raise RequestError("json_schema.strict must be true or false")
    return StructuredOutputs(json=given["schema"])


def _shown(*kinds: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": kind} for kind in (*kinds, "null")]})


def _one_of(value: Any) -> StructuredOutputs:  # noqa: ANN401 - checked there
    return StructuredOutputs(choice=value)


_Structured = Annotated[Any, _as_form(StructuredOutputs.of), _shown("object")]
_Json = Annotated[Any, _as_form(lambda value: StructuredOutputs(json=value)), _shown("object", "string")]
_Regex = Annotated[Any, _as_form(lambda value: StructuredOutputs(regex=value)), _shown("string")]
_Choice = Annotated[Any, _as_form(_one_of), _shown("array")]
_Grammar = Annotated[Any, _as_form(lambda value: StructuredOutputs(grammar=value)), _shown("string")]
_Format = Annotated[Any, _as_form(_response_format), _shown("object")]


class StructuredFields(BaseModel):
    """At most one of them is given. All of them are strict: what an answer's form rules out cannot be generated."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True, frozen=True)

    structured_outputs: _Structured = None  # vLLM's
    guided_json: _Json = None  # vLLM's older names
    guided_regex: _Regex = None
    guided_choice: _Choice = None
    guided_grammar: _Grammar = None
    grammar: _Grammar = None  # llama.cpp's
    json_schema: _Json = None

    def structured(self) -> StructuredOutputs | None:
        """The form that is asked for, in whichever words; 400 if there are two."""
        given = {name: value for name in _NAMES if (value := getattr(self, name, None)) is not None}
        if len(given) > 1:
            first, second, *_ = given
            raise ApiError(
                400, f"{first} and {second} both prescribe the answer's form; give one", param=second
            )
        form: StructuredOutputs | None = next(iter(given.values()), None)
        return form

    def form_field(self) -> str | None:
        """The field that prescribes the form; tools do where no other does."""
        return next((name for name in (*_NAMES, "text", "tools") if getattr(self, name, None)), None)


class FormattedFields(StructuredFields):
    """With OpenAI's word for it."""

    response_format: _Format = None


_NAMES = ("response_format", *StructuredFields.model_fields)
