"""Request bodies of all routes: OpenAI's fields, with vLLM's additions and ours."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator

from foreword.drafters.config import SpeculationSetting
from foreword.engine.prompts import Prediction
from foreword.errors import RequestError
from foreword.server.api.foreign_fields import CHAT, COMPLETION, GENERATE, RESPONSES, TOKENIZE, Fields
from foreword.server.api.message_types import (
    Message,
    TextContent,
    Tool,
    ToolChoice,
    content_text,
    text_message,
)
from foreword.server.api.response_items import flat_choice, flat_tools, item_messages
from foreword.server.api.sampling_types import (
    FormattedFields,
    OpenPart,
    SamplingFields,
    SpeculationOverride,
    StrictBody,
    TokenId,
    TokenIds,
    format_validator,
)
from foreword.server.errors import ApiError
from foreword.server.settings import Limits
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
    """Fields of `/v1/completions` and `/v1/chat/completions`."""

    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=4096)  # accepted, not used
    return_token_ids: bool | None = None  # vLLM: token ids of prompt and answer


def _checked_prompt(value: object) -> object:
    """Check the whole prompt at once, since pydantic would try every member of a union for every entry."""
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
    default_tokens: ClassVar[int | None] = 16  # as OpenAI

    prompt: Annotated[Any, BeforeValidator(_checked_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: int | None = Field(None, ge=0)  # 0 with echo: only the prompt
    logprobs: int | None = Field(None, ge=0)
    echo: bool | None = None  # return the prompt before the answer
    suffix: str | None = None  # text after a gap that the answer fills
    best_of: int | None = Field(None, ge=1)  # must equal n

    @property
    def wanted_tokens(self) -> int | None:
        return None if self.max_tokens is None else max(self.max_tokens, 1)

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts as a list, each a text or token ids."""
        if isinstance(self.prompt, str) or type(self.prompt[0]) is int:
            return [self.prompt]
        return list(self.prompt)

    def check(self, limits: Limits) -> int:
        """Return the number of requested answers; raise 400 for a request that the server refuses."""
        answers, prompts = super().check(limits), len(self.prompts())
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens can be 0 only with echo", param="max_tokens")
        if self.echo and self.suffix:
            reason = "with suffix, the answer is between two parts of the prompt; leave echo out"
            raise ApiError(400, f"echo and suffix exclude each other: {reason}", param="echo")
        best_of = answers if self.best_of is None else self.best_of
        if best_of < answers:
            reason = f"best_of is {best_of}, and n is {answers}; it must be at least n"
            raise ApiError(400, reason, param="best_of")
        if best_of > answers:
            raise ApiError(
                400,
                "best_of above n is not supported: this server returns every answer that it generates; "
                "request n answers with logprobs and choose",
                param="best_of",
            )
        if prompts > limits.prompts:
            raise ApiError(400, f"this server takes at most {limits.prompts} prompts", param="prompt")
        return prompts * answers


class OllamaCompletion(CompletionRequest):
    """A raw or fill-in-the-middle request of Ollama's API."""

    default_tokens: ClassVar[int | None] = None  # an answer may fill the context


def _text_or_tokens(value: object) -> object:
    """Check that the value is a text or token ids."""
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
    logprobs_field: ClassVar[str] = "top_logprobs"
    prompt_field: ClassVar[str] = "messages"

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    prediction: PredictedContent | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # the answer continues the last message
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the model's template
    safety_identifier: str | None = Field(None, max_length=4096)  # accepted, not used
    prompt_cache_key: str | None = Field(None, max_length=4096)  # not used: prefixes are shared by API key

    @field_validator("continue_final_message")
    @classmethod
    def _check_continuation(cls, value: bool | None, info: Any) -> bool | None:  # noqa: ANN401 - pydantic's
        if value and info.data.get("add_generation_prompt"):
            raise ValueError("and add_generation_prompt exclude each other")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _has_logprobs(cls, value: int | None, info: Any) -> int | None:  # noqa: ANN401 - pydantic's
        if value is not None and not info.data.get("logprobs"):
            raise ValueError("needs logprobs to be true")
        return value

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def length_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def expected_answer(self) -> Prediction:
        return None if self.prediction is None else content_text(self.prediction.content)


class GenerateRequest(SamplingFields, RawText):
    """`POST /generate`: our own route, with the library's names."""

    foreign: ClassVar[Fields] = GENERATE
    default_tokens: ClassVar[int | None] = 256  # as the library

    prompt: Annotated[
        str | Annotated[list[TokenId], Field(fail_fast=True, min_length=1)],
        BeforeValidator(_prompt_or_tokens),
    ]
    max_tokens: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0)
    # The expected answer, as text or token ids.
    prediction: (
        Annotated[str | Annotated[list[TokenId], Field(fail_fast=True)], BeforeValidator(_text_or_tokens)]
        | None
    ) = None
    raw: bool = False  # continue the text; otherwise it is a user's message
    stream: bool = False
    speculative: SpeculationOverride = None  # alias of `speculation`

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def expected_answer(self) -> Prediction:
        return self.prediction

    @property
    def speculation_setting(self) -> SpeculationSetting:
        return self.speculation if self.speculative is None else self.speculative

    def check(self, limits: Limits) -> int:
        """Return the number of requested answers; raise 400 for a request that the server refuses."""
        if self.speculative is not None and self.speculation is not None:
            raise ApiError(400, "speculative and speculation are the same; give one", param="speculative")
        return super().check(limits)


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


@format_validator
def _text_format(value: object) -> StructuredOutputs | None:
    """Parse `{"format": {"type": "json_schema", "name": ..., "schema": ...}}`."""
    given = value.get("format", {"type": "text"}) if isinstance(value, dict) else None
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(given, dict) or kind not in ("text", "json_object", "json_schema"):
        raise RequestError("must be an object whose format is of type text, json_object or json_schema")
    if kind == "json_schema" and "schema" not in given:
        raise RequestError("format has no schema")
    if kind == "json_schema":
        return StructuredOutputs(json=given["schema"])
    return StructuredOutputs(json_object=True) if kind == "json_object" else None


_ANY = WithJsonSchema({})
_OBJECT = WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})


class ResponsesRequest(SamplingFields, ToolFields):
    """`POST /v1/responses`."""

    foreign: ClassVar[Fields] = RESPONSES
    prompt_field: ClassVar[str] = "input"

    input: Annotated[Any, BeforeValidator(item_messages), _ANY]
    instructions: str | None = None  # a system message before all others
    max_output_tokens: int | None = Field(None, ge=1)
    text: Annotated[Any, _text_format, _OBJECT] = None
    tools: Annotated[Any, BeforeValidator(flat_tools), _ANY] = None
    tool_choice: Annotated[ToolChoice, BeforeValidator(flat_choice), _ANY] = None
    user: str | None = Field(None, max_length=4096)  # accepted, not used
    safety_identifier: str | None = Field(None, max_length=4096)  # accepted, not used
    prompt_cache_key: str | None = Field(None, max_length=4096)  # not used: prefixes are shared by API key

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def length_field(self) -> str:
        return "max_output_tokens"

    def structured(self) -> StructuredOutputs | None:
        """Return the response format from `text.format` or another field; raise `RequestError` if both are given."""
        other = super().structured()
        if self.text is not None and other is not None:
            raise RequestError("text.format and another field both set the response format; give one", "text")
        return self.text or other

    def check(self, limits: Limits) -> int:
        """Return 1, since a response has one answer; raise 400 for a request that the server refuses."""
        if super().check(limits) != 1:
            raise ApiError(400, "n: a response has one answer; leave n out", param="n")
        return 1

    def messages(self) -> list[Message]:
        """Return the conversation: the instructions as a system message, then the input."""
        first = [] if self.instructions is None else [text_message("system", self.instructions)]
        return [*first, *self.input]
