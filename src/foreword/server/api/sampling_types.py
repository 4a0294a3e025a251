"""Sampling parameters and response formats of HTTP requests, and their conversion to the engine's."""

from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
)

from foreword.acceptance.params import SamplingDefaults, SamplingParams
from foreword.drafters.config import SpeculationSetting
from foreword.drafters.names import named_methods
from foreword.engine.messages import RequestLabels
from foreword.engine.prompts import Prediction
from foreword.errors import RequestError
from foreword.server.api.foreign_fields import GENERATING, Fields
from foreword.server.errors import ApiError
from foreword.server.settings import Limits
from foreword.structured.params import StructuredOutputs

_FORMATS = "text, json_object, json_schema or structural_tag"


def format_validator(make: Callable[[Any], StructuredOutputs | None]) -> BeforeValidator:
    """Return a pydantic validator that converts a field's value to a response format with `make`."""

    def check(value: object) -> StructuredOutputs | None:
        if value is None or isinstance(value, StructuredOutputs):
            return value
        try:
            return make(value)
        except RequestError as error:
            raise ValueError(str(error).removeprefix("structured outputs: ")) from None

    return BeforeValidator(check)


def _response_format(value: object) -> StructuredOutputs | None:
    """Parse OpenAI's format; `{"type": "json_object", "schema": ...}` is llama.cpp's, `structural_tag` vLLM's."""
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
        raise RequestError(f"json_schema has an unknown key {min(other)[:32]!r}; leave it out")
    if given.get("strict") not in (None, True, False):
        raise RequestError("json_schema.strict must be true or false")
    return StructuredOutputs(json=given["schema"])


def _schema(*types: str) -> WithJsonSchema:
    """Return the OpenAPI schema of a field that takes these JSON types or null."""
    return WithJsonSchema({"anyOf": [{"type": name} for name in (*types, "null")]})


_Structured = Annotated[Any, format_validator(StructuredOutputs.of), _schema("object")]
_Json = Annotated[
    Any, format_validator(lambda value: StructuredOutputs(json=value)), _schema("object", "string")
]
_Regex = Annotated[Any, format_validator(lambda value: StructuredOutputs(regex=value)), _schema("string")]
_Choice = Annotated[Any, format_validator(lambda value: StructuredOutputs(choice=value)), _schema("array")]
_Grammar = Annotated[Any, format_validator(lambda value: StructuredOutputs(grammar=value)), _schema("string")]
_Format = Annotated[Any, format_validator(_response_format), _schema("object")]


class StructuredFields(BaseModel):
    """Fields that set the response format; a request gives at most one.

    Tokens that do not match the format cannot be generated.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True, frozen=True)

    structured_outputs: _Structured = None  # vLLM's
    guided_json: _Json = None  # vLLM's older names
    guided_regex: _Regex = None
    guided_choice: _Choice = None
    guided_grammar: _Grammar = None
    grammar: _Grammar = None  # llama.cpp's
    json_schema: _Json = None

    def structured(self) -> StructuredOutputs | None:
        """Return the requested format, from any of the fields; raise 400 if two are given."""
        given = [name for name in _FORMAT_FIELDS if getattr(self, name, None) is not None]
        if len(given) > 1:
            first, second, *_ = given
            raise ApiError(400, f"{first} and {second} both set the response format; give one", param=second)
        response_format: StructuredOutputs | None = getattr(self, given[0]) if given else None
        return response_format

    def format_field(self) -> str | None:
        """Return the name of the field that sets the response format; None: none does."""
        return next((name for name in (*_FORMAT_FIELDS, "text", "tools") if getattr(self, name, None)), None)


class FormattedFields(StructuredFields):
    """Fields that set the response format, including OpenAI's `response_format`."""

    response_format: _Format = None


_FORMAT_FIELDS = ("response_format", *StructuredFields.model_fields)


NonEmpty = Annotated[str, StringConstraints(min_length=1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[NonEmpty], Field(fail_fast=True)]


def _checked_override(value: object) -> object:
    """Check a value of `speculation`; convert a method's name to the equivalent object."""
    if isinstance(value, str):
        return named_methods(value)
    if value is None or isinstance(value, bool | dict):
        return value
    raise ValueError('must be true, false, a method such as "ngram" or an object such as {"method": "ngram"}')


SpeculationOverride = Annotated[
    bool | dict[str, Any] | None,
    BeforeValidator(_checked_override, json_schema_input_type=bool | str | dict[str, Any] | None),
]
"""False: no speculation for this request; a method or an object: drafter and limits; True or null: the default."""


def _checked_priority(value: object) -> object:
    """Check the value before pydantic does: its errors would name the members of the union."""
    is_number = type(value) is int and -(2**31) <= value < 2**31
    if value is None or is_number or (isinstance(value, str) and len(value) <= 64):
        return value
    raise ValueError("must be a whole number of 32 bits, or a text of at most 64 characters")


def _as_list(value: object) -> object:
    if not isinstance(value, (str, list)):
        raise ValueError("must be a text or a list of texts")
    return [value] if isinstance(value, str) else value


def _checked_bias(value: dict[str, float]) -> dict[str, float]:
    for token, bias in value.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise ValueError("keys must be token ids")
        if not -100 <= bias <= 100:
            raise ValueError("values must be in -100 .. 100")
    return value


class StrictBody(BaseModel):
    """Base of request bodies: no unknown fields, no NaN, no strings for numbers.

    Before validation, `UnknownFields` removes or refuses unknown fields; `foreign` says which.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True, frozen=True)
    foreign: ClassVar[Fields] = {}


class OpenPart(StrictBody):
    """An object inside a body. It stores unknown fields, which `UnknownFields` checks after validation."""

    model_config = ConfigDict(extra="allow")


class SamplingFields(StructuredFields, StrictBody):
    """Sampling fields of all generating routes, including vLLM's additions."""

    foreign: ClassVar[Fields] = GENERATING
    default_tokens: ClassVar[int | None] = None  # maximum length of an answer; None: the remaining context
    logprobs_field: ClassVar[str] = "logprobs"  # the field that sets `wanted_logprobs`
    prompt_field: ClassVar[str] = "prompt"

    model: str | None = Field(None, max_length=512)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float], AfterValidator(_checked_bias)] | None = None
    n: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Annotated[Texts, BeforeValidator(_as_list)] | None = Field(
        None,
        json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    )
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: int | None = Field(None, ge=0)
    include_stop_str_in_output: bool | None = None
    speculation: SpeculationOverride = None
    metadata: dict[str, str] | None = None  # rules of the policy file can match it
    # A number: requests with lower ones are scheduled earlier, as in vLLM. A text: policy rules can match it.
    priority: Annotated[int | str | None, BeforeValidator(_checked_priority)] = None
    deadline_ms: float | None = Field(None, gt=0)  # milliseconds after arrival at the engine
    # "end": the answer ends at the deadline; "refuse": it fails as soon as it cannot finish in time
    on_deadline: Literal["end", "refuse"] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        """The requested maximum length of an answer; None: `default_tokens`."""
        return None

    @property
    def length_field(self) -> str:
        """The field that sets `wanted_tokens`."""
        return "max_tokens"

    @property
    def wanted_logprobs(self) -> int | None:
        """The requested number of alternatives per token with their log-probabilities; None: no log-probabilities."""
        return None

    @property
    def expected_answer(self) -> Prediction:
        """The answer that the client expects, as text or token ids."""
        return None

    @property
    def speculation_setting(self) -> SpeculationSetting:
        return self.speculation

    def labels(self, model: str, adapter: str = "") -> RequestLabels:
        """Return what the rules of the policy file can match, besides prompt and sampling parameters."""
        priority = "" if self.priority is None else str(self.priority)
        return RequestLabels(self.metadata or {}, priority, bool(self.stream), model, adapter)

    def check(self, limits: Limits) -> int:
        """Return the number of requested answers; raise 400 for values above the server's limits."""
        _at_most("n", self.n, limits.n)
        _at_most(self.logprobs_field, self.wanted_logprobs, limits.logprobs)
        _at_most("prompt_logprobs", self.prompt_logprobs, limits.logprobs)
        _at_most("number of stops", len(self.stop or ()), limits.stops, param="stop")
        for stop in self.stop or ():
            _at_most("length of a stop", len(stop), limits.stop_characters, param="stop")
        _at_most("number of bad_words", len(self.bad_words or ()), limits.bad_words, param="bad_words")
        for word in self.bad_words or ():
            _at_most("length of a bad word", len(word), limits.stop_characters, param="bad_words")
        for name in ("stop_token_ids", "allowed_token_ids"):
            _at_most(f"length of {name}", len(getattr(self, name) or ()), limits.listed_tokens, param=name)
        return self.n or 1

    def sampling_params(self, max_tokens: int, defaults: SamplingDefaults) -> SamplingParams:
        """Return the engine's parameters; missing ones are the model's or the engine's defaults."""
        given: dict[str, Any] = {}
        for name in _PARAMS:
            value = getattr(self, name)
            given[name] = tuple(value) if isinstance(value, list) else value
        given["logit_bias"] = {int(token): bias for token, bias in (self.logit_bias or {}).items()} or None
        given["seed"] = None if self.seed is None else self.seed % 2**64
        structured, logprobs = self.structured(), self.wanted_logprobs
        return defaults.params(max_tokens=max_tokens, logprobs=logprobs, structured=structured, **given)


_PARAMS = [param.name for param in fields(SamplingParams) if param.name in SamplingFields.model_fields]
"""Names that are both a field of the body and a field of the engine's parameters."""


def _at_most(label: str, value: int | None, limit: int, param: str | None = None) -> None:
    """Raise 400 for a value above the limit; `label` describes the value, `param` is the field if its name differs."""
    if value is not None and value > limit:
        raise ApiError(400, f"{label} is {value}; this server takes at most {limit}", param=param or label)
