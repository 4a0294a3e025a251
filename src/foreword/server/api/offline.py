"""Parses a request body as the server would, for `foreword policy explain`."""

from dataclasses import dataclass, replace
from typing import Any

from foreword.acceptance.params import SamplingDefaults, SamplingParams
from foreword.control.policy_file.matching import RequestTraits
from foreword.drafters.config import SpeculationSetting
from foreword.errors import RequestError
from foreword.server.api.bodies import UnknownFields, checked_body, load_object, too_long
from foreword.server.api.chat import CHAT
from foreword.server.api.completions import COMPLETIONS
from foreword.server.api.conversation import tool_use
from foreword.server.api.entry import AnswerRoute, field_error
from foreword.server.api.generate import GENERATE
from foreword.server.api.message_types import Message
from foreword.server.api.prompts import check_messages
from foreword.server.api.request_types import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    ResponsesRequest,
)
from foreword.server.api.responses import RESPONSES
from foreword.server.api.sampling_types import SamplingFields
from foreword.server.api.tool_blocks import format_of
from foreword.server.context import check_speculation
from foreword.server.settings import Limits, ServerSettings

CHARACTERS_PER_TOKEN = 4
"""Characters per token that are assumed without a tokenizer."""

_LONGEST_ANSWER = 2**31 - 1
"""Stands for a maximum answer length that only the model's context limits."""


@dataclass(frozen=True)
class OfflineRequest:
    """A parsed request."""

    traits: RequestTraits  # what the rules of the policy file match
    speculation: SpeculationSetting
    notes: list[str]  # assumptions about what only the server knows, for users


ROUTES: dict[str, AnswerRoute[Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/generate": GENERATE,
}


def read_offline(
    data: bytes,
    settings: ServerSettings,
    *,
    route: str | None = None,
    tenant: str = "",
    prompt_tokens: int | None = None,
    adapter: str = "",
) -> OfflineRequest:
    """Return the parsed request; raise the server's error if it is invalid.

    Without `route`, the body's fields select the route. `adapter` is the LoRA adapter that the request's model names,
    if any, since only the server knows the names of adapters.
    """
    if len(data) > settings.limits.body_bytes:
        raise too_long(settings.limits)
    value = load_object(data, settings.limits)
    model = ROUTES[route or _route_of(value)].model
    unknown = UnknownFields(settings.strict_fields)
    body = checked_body(value, model, unknown)
    try:
        body.check(settings.limits)
        speculation = check_speculation(body.speculation_setting, settings)
        params = _params(body)
    except RequestError as error:
        raise field_error(error, body) from None
    notes = [f"the server ignores {path}" for path in unknown.listed_fields()]
    if prompt_tokens is None:
        prompt_tokens = _estimate_prompt_tokens(body, settings.limits, notes)
    if body.temperature is None:
        notes.append("temperature taken as 1: the model's generation config may recommend another")
    labels = body.labels(body.model or "")
    traits = RequestTraits(
        tenant=tenant,
        model=labels.model,
        adapter=adapter,
        temperature=params.temperature,
        prompt_tokens=prompt_tokens,
        json_schema=params.structured is not None,
        stream=labels.stream,
        priority=labels.priority,
        metadata=labels.metadata,
    )
    return OfflineRequest(traits, speculation, notes)


def _route_of(value: dict[str, Any]) -> str:
    """Return the route whose fields the body has."""
    keys = set(value)
    if "messages" in keys:
        return "/v1/chat/completions"
    if "input" in keys:
        return "/v1/responses"
    only_generate = GenerateRequest.model_fields.keys() - CompletionRequest.model_fields.keys()
    return "/generate" if keys & only_generate else "/v1/completions"


def _params(body: SamplingFields) -> SamplingParams:
    """Return the engine's parameters; raise `RequestError` for invalid combinations of valid fields."""
    tokens = body.wanted_tokens or body.default_tokens or _LONGEST_ANSWER
    params = body.sampling_params(tokens, SamplingDefaults())
    if isinstance(body, ChatRequest | ResponsesRequest):
        use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, format_of(None))
        if use is not None:
            params = replace(params, structured=use.structured(params.structured))
    return params


def _estimate_prompt_tokens(body: SamplingFields, limits: Limits, notes: list[str]) -> int:
    """Return the prompt's length; if it is estimated, add a note."""
    prompt = _prompt(body, limits, notes)
    if isinstance(prompt, list):
        return len(prompt)
    tokens = max(len(prompt) // CHARACTERS_PER_TOKEN, 1)
    notes.append(f"prompt_tokens estimated as {tokens}: one for {CHARACTERS_PER_TOKEN} characters")
    return tokens


def _prompt(body: SamplingFields, limits: Limits, notes: list[str]) -> str | list[int]:
    """Return the prompt's text or token ids; if there are several prompts, the first, with a note."""
    if isinstance(body, ChatRequest):
        return _text(body.messages, limits)
    if isinstance(body, ResponsesRequest):
        return _text(body.messages(), limits)
    if isinstance(body, GenerateRequest):
        return body.prompt
    assert isinstance(body, CompletionRequest)
    first, *others = body.prompts()
    if others:
        notes.append(f"the first of {1 + len(others)} prompts is explained")
    return first


def _text(messages: list[Message], limits: Limits) -> str:
    check_messages(len(messages), limits)
    return "".join(message.text for message in messages)
