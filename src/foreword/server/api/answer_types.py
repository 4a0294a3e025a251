"""The server's answers: OpenAI's shapes with our additions. Fields that are UNSET are left out."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import astuple

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.control.reporting.figures import run_percentile
from foreword.engine.messages import RequestStats
from foreword.engine.outputs import Costs, accepted_runs, alternatives
from foreword.engine.text import token_text
from foreword.models.tokenization.tokenizer import Tokenizer


class AnswerUsage(Struct, frozen=True, omit_defaults=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | UnsetType = UNSET
    completion_tokens_details: dict[str, int] | UnsetType = UNSET  # if there was a prediction


class CompletionLogprobs(Struct):
    """Of one choice, in the form of the older route."""

    tokens: list[str]
    token_logprobs: list[float | None]  # null: the first token of a prompt, which nothing precedes
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(Struct, frozen=True):
    """One of the likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob, frozen=True):
    """One token of a chat answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Of one choice, in the form of the chat route."""

    content: list[ChatTokenLogprob]
    refusal: None = None


PromptLogprobs = list[dict[str, dict[str, Any]] | None]
"""As vLLM has it: per prompt token (None for the first) token id -> logprob, rank and text."""


class CalledTool(Struct, omit_defaults=True):
    """What is called; in a stream, what is new of it."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET  # JSON text

    def parsed(self) -> dict[str, Any]:
        """The arguments as an object; none where the answer was cut before they were whole."""
        try:
            given = json.loads(self.arguments or "{}")
        except ValueError:
            return {}
        return given if isinstance(given, dict) else {}


class ToolCall(Struct, omit_defaults=True):
    """A call of a tool, or in a stream what it has gained."""

    function: CalledTool
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    index: int | UnsetType = UNSET  # which call it is; only in streams


class ChatMessage(Struct):
    """What the assistant says."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatDelta(Struct, omit_defaults=True):
    """What the assistant's message has gained."""

    role: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Choice(Struct):
    """An answer, or what it has gained."""

    index: int
    text: str | UnsetType = UNSET  # of /v1/completions
    message: ChatMessage | UnsetType = UNSET  # of /v1/chat/completions, whole
    delta: ChatDelta | UnsetType = UNSET  # the same in a stream
    logprobs: CompletionLogprobs | ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    seed: int | UnsetType = UNSET  # the one in use, given or fresh
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET  # if requested
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Struct):
    """A whole answer or one chunk of a stream."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    object: str
    system_fingerprint: str
    usage: AnswerUsage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET  # of /v1/chat/completions
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: dict[str, Any] | UnsetType = UNSET  # llama.cpp's names
    speculation: dict[str, Any] | UnsetType = UNSET


def usage_of(stats: RequestStats) -> AnswerUsage:
    """Return the token counts of a request."""
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
    """Return the speculation figures of a request."""
    runs = accepted_runs(stats)
    by_position = zip(stats.accepted_per_position, stats.drafted_per_position, strict=False)
    return {
        "method": stats.method,  # the drafter; empty: none
        "passes": stats.passes,  # target passes, those over the prompt included
        "drafts": stats.drafts,  # passes that verified draft tokens
        "drafted": stats.drafted,  # draft tokens that were verified
        "accepted": stats.accepted,  # draft tokens that were accepted
        "acceptance_rate": _ratio(stats.accepted, stats.drafted),
        "acceptance_per_position": [_ratio(accepted, drafted) for accepted, drafted in by_position],
        "tau": _ratio(stats.output_tokens, stats.passes),  # tokens per target pass
        "accepted_run_p50": run_percentile(runs, 0.5),  # draft tokens accepted by a pass that verified some
        "accepted_run_p90": run_percentile(runs, 0.9),
    }


def extras_of(costs: Costs, show_speculation: bool) -> dict[str, Any]:
    """Return timings and speculation figures; where these are hidden, the timings lose their draft counts too."""
    timings = asdict(costs.timings())
    if show_speculation:
        return {"timings": timings, "speculation": speculation_of(costs.total())}
    hidden = {"passes", "draft_n", "draft_n_accepted"}
    return {"timings": {name: value for name, value in timings.items() if name not in hidden}}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


_NEVER = -9999.0
"""What OpenAI says instead of minus infinity, which JSON does not have."""


class LogprobWriter:
    """Writes log probabilities with the text of each token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def _text(self, token: int) -> str:
        return token_text(self._tokenizer, token)

    def completion(self, entries: Sequence[TokenLogprobs], offset: int) -> tuple[CompletionLogprobs, int]:
        """For the older route; `offset` is where the first token's text starts, the next offset is returned too."""
        written = CompletionLogprobs([], [], [], [])
        for entry in entries:
            text = self._text(entry.token)
            written.tokens.append(text)
            written.token_logprobs.append(_finite(entry.logprob))
            written.top_logprobs.append({self._text(token): value for token, value in _top(entry)})
            written.text_offset.append(offset)
            offset += len(text)
        return written, offset

    def echoed(
        self, prompt: Sequence[int], entries: Sequence[TokenLogprobs]
    ) -> tuple[CompletionLogprobs, int]:
        """Of a prompt that stands before its answer: nothing is known of its first token."""
        first = self._text(prompt[0])
        written, offset = self.completion(entries, len(first))
        for known, value in zip(astuple(written), (first, None, None, 0), strict=True):
            known.insert(0, value)
        return written, offset

    def chat(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
        return ChatLogprobs(
            [
                ChatTokenLogprob(
                    *self._scored(entry.token, entry.logprob),
                    [TopLogprob(*self._scored(*one)) for one in _top(entry)],
                )
                for entry in entries
            ]
        )

    def _scored(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        """Return a token's text, log probability and bytes."""
        shown = list(self._tokenizer.token_bytes(token, skip_special_tokens=False))
        return self._text(token), _finite(logprob), shown

    def prompt(self, entries: Sequence[TokenLogprobs]) -> PromptLogprobs:
        """Of a prompt, as vLLM has them: nothing for its first token, which nothing precedes."""
        return [None, *(self._ranked(entry) for entry in entries)]

    def _ranked(self, entry: TokenLogprobs) -> dict[str, dict[str, Any]]:
        found = alternatives(entry, self._tokenizer)
        return {
            str(token): asdict(replace(one, logprob=_finite(one.logprob))) for token, one in found.items()
        }


def _top(entry: TokenLogprobs) -> list[tuple[int, float]]:
    pairs = zip(entry.top_ids.tolist(), entry.top_logprobs.tolist(), strict=True)
    return [(token, _finite(value)) for token, value in pairs]


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _NEVER
