"""Response bodies of OpenAI's routes, and `Dialect`, the interface of all formats. UNSET fields are omitted."""

import json
import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from time import time
from typing import Any, Protocol

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import astuple

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.control.reporting.figures import run_percentile
from foreword.engine.messages import AnswerDelta, NewRequest, RequestStats
from foreword.engine.outputs import Answer, Costs, accepted_runs, alternatives
from foreword.engine.text import token_text
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.server.api.request_types import OpenAIFields
from foreword.server.context import ServerContext


class AnswerUsage(Struct, frozen=True, omit_defaults=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | UnsetType = UNSET
    completion_tokens_details: dict[str, int] | UnsetType = UNSET  # only with a prediction


class CompletionLogprobs(Struct):
    """Log-probabilities of one choice, in the format of `/v1/completions`."""

    tokens: list[str]
    token_logprobs: list[float | None]  # null for the first token of a prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(Struct, frozen=True):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob, frozen=True):
    """A token of a chat answer, with the likeliest tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities of one choice, in the format of `/v1/chat/completions`."""

    content: list[ChatTokenLogprob]
    refusal: None = None


PromptLogprobs = list[dict[str, dict[str, Any]] | None]
"""vLLM's format: for each prompt token (None for the first), token id -> logprob, rank and text."""


class CalledTool(Struct, omit_defaults=True):
    """A called function; in a stream, its new part."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET  # JSON text

    def parsed(self) -> dict[str, Any]:
        """Return the arguments as an object; empty if the answer was cut within them."""
        try:
            given = json.loads(self.arguments or "{}")
        except ValueError:
            return {}
        return given if isinstance(given, dict) else {}


class ToolCall(Struct, omit_defaults=True):
    """A tool call; in a stream, its new part."""

    function: CalledTool
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    index: int | UnsetType = UNSET  # index of the call; only in streams


class ChatMessage(Struct):
    """The assistant's message."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatDelta(Struct, omit_defaults=True):
    """New part of the assistant's message, in a stream."""

    role: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Choice(Struct):
    """An answer; in a stream, its new part."""

    index: int
    text: str | UnsetType = UNSET  # of /v1/completions
    message: ChatMessage | UnsetType = UNSET  # of /v1/chat/completions
    delta: ChatDelta | UnsetType = UNSET  # of /v1/chat/completions, in a stream
    logprobs: CompletionLogprobs | ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    seed: int | UnsetType = UNSET  # the seed in use
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET  # of /v1/completions
    token_ids: list[int] | UnsetType = UNSET  # if requested
    prompt_token_ids: list[int] | UnsetType = UNSET  # if requested, of /v1/completions


class Completion(Struct):
    """A complete response, or one chunk of a stream."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    object: str
    system_fingerprint: str
    usage: AnswerUsage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET  # of /v1/chat/completions
    prompt_token_ids: list[int] | UnsetType = UNSET  # if requested, of /v1/chat/completions
    timings: dict[str, Any] | UnsetType = UNSET  # llama.cpp's names
    speculation: dict[str, Any] | UnsetType = UNSET


def usage_of(stats: RequestStats) -> AnswerUsage:
    names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
    predicted = {name: getattr(stats, name) for name in names}
    return AnswerUsage(
        stats.prompt_tokens,
        stats.output_tokens,
        stats.prompt_tokens + stats.output_tokens,
        {"cached_tokens": stats.cached_tokens},
        predicted if any(predicted.values()) else UNSET,
    )


def speculation_of(stats: RequestStats) -> dict[str, Any]:
    runs = accepted_runs(stats)
    by_position = zip(stats.accepted_per_position, stats.drafted_per_position, strict=False)
    return {
        "method": stats.method,  # the drafter; empty: none
        "passes": stats.passes,  # target passes, including prefill
        "drafts": stats.drafts,  # passes that verified draft tokens
        "drafted": stats.drafted,  # verified draft tokens
        "accepted": stats.accepted,  # accepted draft tokens
        "acceptance_rate": _ratio(stats.accepted, stats.drafted),
        "acceptance_per_position": [_ratio(accepted, drafted) for accepted, drafted in by_position],
        "tau": _ratio(stats.output_tokens, stats.passes),  # tokens per target pass
        "accepted_run_p50": run_percentile(runs, 0.5),  # accepted draft tokens per pass with a draft
        "accepted_run_p90": run_percentile(runs, 0.9),
    }


def extras_of(costs: Costs, show_speculation: bool) -> dict[str, Any]:
    """Return timings and speculation figures; without `show_speculation`, only timings that do not show drafts."""
    timings = asdict(costs.timings())
    if show_speculation:
        return {"timings": timings, "speculation": speculation_of(costs.total())}
    hidden = {"passes", "draft_n", "draft_n_accepted"}
    return {"timings": {name: value for name, value in timings.items() if name not in hidden}}


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else 0.0


_NEVER = -9999.0
"""OpenAI's replacement for minus infinity, which JSON does not have."""


class LogprobWriter:
    """Formats log-probabilities with token texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def _text(self, token: int) -> str:
        return token_text(self._tokenizer, token)

    def completion(self, entries: Sequence[TokenLogprobs], offset: int) -> tuple[CompletionLogprobs, int]:
        """Return the format of `/v1/completions`, and the offset after the last token.

        `offset` is the first token's position in the text.
        """
        logprobs = CompletionLogprobs([], [], [], [])
        for entry in entries:
            text = self._text(entry.token)
            logprobs.tokens.append(text)
            logprobs.token_logprobs.append(_finite(entry.logprob))
            logprobs.top_logprobs.append({self._text(token): value for token, value in _top(entry)})
            logprobs.text_offset.append(offset)
            offset += len(text)
        return logprobs, offset

    def echoed(
        self, prompt: Sequence[int], entries: Sequence[TokenLogprobs]
    ) -> tuple[CompletionLogprobs, int]:
        """Return the format of `/v1/completions` for an echoed prompt, and the offset after its last token.

        The prompt's first token has no log-probability, and no entry.
        """
        first = self._text(prompt[0])
        logprobs, offset = self.completion(entries, len(first))
        for column, value in zip(astuple(logprobs), (first, None, None, 0), strict=True):
            column.insert(0, value)
        return logprobs, offset

    def chat(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """Return the format of `/v1/chat/completions`."""
        content = []
        for entry in entries:
            top = [TopLogprob(*self._scored(token, logprob)) for token, logprob in _top(entry)]
            content.append(ChatTokenLogprob(*self._scored(entry.token, entry.logprob), top))
        return ChatLogprobs(content)

    def _scored(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        """Return (text, log-probability, bytes) of a token."""
        token_bytes = list(self._tokenizer.token_bytes(token, skip_special_tokens=False))
        return self._text(token), _finite(logprob), token_bytes

    def prompt(self, entries: Sequence[TokenLogprobs]) -> PromptLogprobs:
        """Return vLLM's format for a prompt; the entry of the first token is None."""
        return [None, *(self._ranked(entry) for entry in entries)]

    def _ranked(self, entry: TokenLogprobs) -> dict[str, dict[str, Any]]:
        """Return the likeliest tokens at a position, and the token itself, by token id."""
        ranked = alternatives(entry, self._tokenizer)
        return {
            str(token): asdict(replace(alternative, logprob=_finite(alternative.logprob)))
            for token, alternative in ranked.items()
        }


def _top(entry: TokenLogprobs) -> list[tuple[int, float]]:
    """Return (token id, log-probability) of the likeliest tokens at a position."""
    pairs = zip(entry.top_ids.tolist(), entry.top_logprobs.tolist(), strict=True)
    return [(token, _finite(value)) for token, value in pairs]


def _finite(logprob: float) -> float:
    """Return a log-probability that JSON can represent."""
    return logprob if math.isfinite(logprob) else _NEVER


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(16)}"


class Dialect(Protocol):
    """Formats the answers of a route, in a stream or as a whole response."""

    def opening(self) -> Iterable[object]:
        """Return the events before the first delta of a stream."""

    def chunk(self, choice: int, delta: AnswerDelta) -> object | None:
        """Return the event, or list of events, for a delta of an answer; None: nothing to send."""

    def closing(self) -> Iterable[object]:
        """Return the events after the last delta of a stream."""

    def whole(self, answers: Sequence[Answer], costs: Costs) -> object:
        """Return the body of a response that is not streamed."""


class OpenAIDialect:
    """Base of the dialects of OpenAI's routes: the fields around the choices, such as token counts and timings."""

    kind: str  # the field `object` of complete responses
    chunk_kind: str  # the field `object` of stream chunks

    def __init__(
        self, context: ServerContext, body: OpenAIFields, answer_id: str, requests: Sequence[NewRequest]
    ) -> None:
        options = body.stream_options
        self._settings = context.settings
        self._model = body.model or context.settings.model_name
        self._logprobs = LogprobWriter(context.prompts.tokenizer)
        self._n = body.n or 1
        self._wants_usage = bool(options and options.include_usage)
        self._wants_usage_always = bool(options and options.continuous_usage_stats)
        self._wants_token_ids = bool(body.return_token_ids)
        self._requests = requests
        self._sent_tokens = [0] * (len(requests) * self._n)  # number of tokens sent, by choice
        self._costs = Costs(len(self._sent_tokens))
        self._id = answer_id
        self._created = int(time())

    def closing(self) -> Iterable[Completion]:
        """Yield a chunk without choices that has the token counts, if requested."""
        if self._wants_usage:
            yield self._completion([], self.chunk_kind, usage=self._usage_of_costs(self._costs))

    def _usage_of_costs(self, costs: Costs) -> AnswerUsage:
        return usage_of(costs.total())

    def _completion(
        self,
        choices: list[Choice],
        kind: str,
        costs: Costs | None = None,
        **more: Any,  # noqa: ANN401 - fields of `Completion`
    ) -> Completion:
        """Return a response with these choices; `costs` are given with the last choice of a stream."""
        extras = {} if costs is None else extras_of(costs, self._settings.show_speculation)
        return Completion(
            self._id, self._created, self._model, choices, kind, self._settings.fingerprint, **extras, **more
        )

    def _prompt_ids(self, choice: int) -> list[int]:
        return list(self._requests[choice // self._n].prompt_token_ids)

    def _end_fields(self, delta: AnswerDelta) -> dict[str, Any]:
        """Return the fields that a choice has at its end, and its token ids if requested."""
        return {
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "seed": UNSET if delta.finish_reason is None else delta.seed,
            "token_ids": list(delta.token_ids) if self._wants_token_ids else UNSET,
        }

    def _count_chunk_usage(self, choice: int, tokens: int = 0) -> AnswerUsage | UnsetType | None:
        """Add a choice's new tokens to its count, and return the field `usage` of their chunk.

        As in vLLM: with `continuous_usage_stats` the choice's counts so far, otherwise null before the last chunk.
        """
        self._sent_tokens[choice] += tokens
        if not self._wants_usage:
            return UNSET
        if not self._wants_usage_always:
            return None
        prompt, sent = len(self._requests[choice // self._n].prompt_token_ids), self._sent_tokens[choice]
        return AnswerUsage(prompt, sent, prompt + sent)
