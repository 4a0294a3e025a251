"""Request bodies of all routes: OpenAI's fields, with vLLM's additions and ours."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, WithJsonSchema, field_validator

from foreword.errors import RequestError, in_plain_words
from foreword.server.api.foreign_fields import CHAT, COMPLETION, GENERATE, RESPONSES, TOKENIZE, Fields
from foreword.server.api.message_types import Message, TextContent, Tool, ToolChoice, ToolFunction, no_text
from foreword.server.api.sampling_types import (
    FormattedFields,
    OpenPart,
    SamplingFields,
    SpeculationOverride,
    StrictBody,
    TokenId,
    TokenIds,
)
from foreword.structured.params import StructuredOutputs


class RawText(StrictBody):
    """Tokenization options of text without a chat template; vLLM's and llama.cpp's names."""

    add_special_tokens: bool = True  # add the model's special tokens
    parse_special: bool = True  # names of control tokens become these tokens


class StreamOptions(OpenPart):
    """Additional contents of a stream."""

    include_usage: bool | None = None  # a final chunk with token counts
    continuous_usage_stats: bool | None = None  # vLLM: with include_usage, counts so far in every chunk
    include_obfuscation: bool | None = None  # accepted for OpenAI's clients; no padding


class OpenAIFields(FormattedFields, SamplingFields):
    """Fields of both routes."""

    model: str | None = Field(None, max_length=512)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=4096)  # accepted, not used
    return_token_ids: bool | None = None  # vLLM: token ids of prompt and answer


def _checked_prompt(value: object) -> object:
    """Check the whole list once, since pydantic's unions would try every form for every entry."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text, a list of texts, a list of token ids or a list of those")
    if _are_tokens(value) or all(type(entry) is str for entry in value):
        return value
    if all(isinstance(entry, list) and entry and _are_tokens(entry) for entry in value):
        return value
    raise ValueError("must be a text, a list of texts, a list of token ids or a list of those")


def _are_tokens(values: list[object]) -> bool:
    return all(type(entry) is int and 0 <= entry < 2**31 for entry in values)


_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "minItems": 1,
        },
    ]
}


class CompletionRequest(OpenAIFields, RawText):
    """`POST /v1/completions`."""

    foreign: ClassVar[Fields] = COMPLETION

    prompt: Annotated[Any, BeforeValidator(_checked_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: int | None = Field(None, ge=0)  # 0 with echo: only the prompt
    logprobs: int | None = Field(None, ge=0)
    echo: bool | None = None  # return the prompt before the answer
    suffix: str | None = None  # text after a gap that the answer fills
    best_of: int | None = Field(None, ge=1)  # must equal n

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt: text or token ids."""
        if isinstance(self.prompt, str) or type(self.prompt[0]) is int:
            return [self.prompt]
        return list(self.prompt)


def _text_or_tokens(value: object) -> object:
    """Check the whole value, like a prompt."""
    if not isinstance(value, str) and not (isinstance(value, list) and _are_tokens(value)):
        raise ValueError("must be a text or a list of token ids")
    return value


def _prompt_or_tokens(value: object) -> object:
    if value == []:
        raise ValueError("must not be empty")
    return _text_or_tokens(value)


class PredictedContent(OpenPart):
    """The expected answer, in OpenAI's format."""

    type: Literal["content"]
    content: TextContent


_Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=128)]


class ToolFields(StrictBody):
    """Tools and reasoning of a conversation."""

    tools: _Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None  # False: at most one call
    thinking_token_budget: int | None = Field(None, ge=0)  # vLLM: maximum reasoning tokens


class ChatRequest(OpenAIFields, ToolFields):
    """`POST /v1/chat/completions`."""

    foreign: ClassVar[Fields] = CHAT

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    prediction: PredictedContent | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # continue the last message
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the model's template
    safety_identifier: str | None = Field(None, max_length=4096)  # accepted, not used
    prompt_cache_key: str | None = Field(None, max_length=4096)  # accepted; the API key decides

    @field_validator("continue_final_message")
    @classmethod
    def _continues_or_begins(cls, value: bool | None, info: Any) -> bool | None:  # noqa: ANN401 - pydantic's
        if value and info.data.get("add_generation_prompt"):
            raise ValueError("and add_generation_prompt exclude each other")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _has_logprobs(cls, value: int | None, info: Any) -> int | None:  # noqa: ANN401 - pydantic's
        if value is not None and not info.data.get("logprobs"):
            raise ValueError("needs logprobs to be true")
        return value


class GenerateRequest(SamplingFields, RawText):
    """`POST /generate`: our own route, with the library's names."""

    foreign: ClassVar[Fields] = GENERATE

    model: str | None = Field(None, max_length=512)
    prompt: Annotated[
        str | Annotated[list[TokenId], Field(fail_fast=True, min_length=1)],
        BeforeValidator(_prompt_or_tokens),
    ]
    max_tokens: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0)
    # The expected answer.
    prediction: (
        Annotated[str | Annotated[list[TokenId], Field(fail_fast=True)], BeforeValidator(_text_or_tokens)]
        | None
    ) = None
    raw: bool = False  # continue the text; otherwise it is a user's message
    stream: bool = False
    speculative: SpeculationOverride = None  # alias of `speculation`


class TokenizeRequest(RawText):
    """`POST /tokenize`: a text or a conversation."""

    foreign: ClassVar[Fields] = TOKENIZE

    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)] | None = None
    add_generation_prompt: bool = True
    model: str | None = Field(None, max_length=512)


class DetokenizeRequest(StrictBody):
    """`POST /detokenize`."""

    tokens: TokenIds
    skip_special_tokens: bool = False
    model: str | None = Field(None, max_length=512)


Part = TypeVar("Part", bound=BaseModel)

_TEXT_PARTS = ("input_text", "output_text", "text")


def _messages(value: object) -> list[Message]:
    """Parse a string, or a list of messages, tool calls and tool results."""
    if isinstance(value, str):
        return [_text_message("user", value)]
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
        return _text_message(item["role"], _text(place, item["content"]))
    except KeyError as error:
        raise ValueError(f"item {place} has no {error.args[0]}") from None


def _text_message(role: object, text: str) -> Message:
    return _read(Message, {"role": role, "content": text})


def _read(model: type[Part], value: object) -> Part:
    """Validate as `model`; errors are one line, to follow the field's name."""
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
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or kind not in _TEXT_PARTS:
            raise ValueError(f"item {place} has a part {no_text(kind)}")
        texts.append(str(part.get("text", "")))
    return "".join(texts)


def _tools(value: object) -> list[Tool] | None:
    """Parse functions, whose fields are at the top level here."""
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


class ResponsesRequest(SamplingFields, ToolFields):
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
    user: str | None = Field(None, max_length=4096)  # accepted, not used
    safety_identifier: str | None = Field(None, max_length=4096)  # accepted, not used
    prompt_cache_key: str | None = Field(None, max_length=4096)  # accepted; the API key decides

    def messages(self) -> list[Message]:
        """The conversation."""
        first = [] if self.instructions is None else [_text_message("system", self.instructions)]
        return [*first, *self.input]
