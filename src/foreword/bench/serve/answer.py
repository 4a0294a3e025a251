"""Reads one streamed answer: its events, and the times and counts of the request."""

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from foreword.wire.openai_http import EventParser


class Ending(StrEnum):
    """The end of a request. Only completed requests count for latencies and throughput."""

    COMPLETED = "completed"
    DROPPED = "dropped on purpose"
    REFUSED = "HTTP error"
    TIMEOUT = "timeout"
    NO_CONNECTION = "no connection"
    CUT_OFF = "cut off by the server"
    REPORTED = "error in the stream"
    MALFORMED = "malformed answer"


@dataclass(frozen=True)
class ContentChunk:
    """A piece of text as it arrived."""

    time: float
    tokens: int | None  # tokens in this chunk and in chunks without text before it; None: unknown


@dataclass
class RequestOutcome:
    """One request, filled in while it runs; times are seconds of one monotonic clock."""

    due: float  # scheduled send time; latencies count from here
    sent: float | None = None  # when the whole request had been written to a connection; None: never
    ended_at: float = 0.0  # when the request ended, for whatever reason
    ending: Ending | None = None
    detail: str = ""  # description of a failure
    status: int | None = None  # HTTP status, once there is one
    retry_after: str | None = None  # Retry-After header of a refusal
    chunks: list[ContentChunk] = field(default_factory=list)
    last: float | None = None  # arrival of the last chunk with text or a finish reason
    prompt_tokens: int | None = None  # from usage
    usage_tokens: int | None = None  # output tokens from usage
    drop_after: int | None = None  # content chunks after which the client disconnects on purpose


DONE = b"[DONE]"
FAILED_REASONS = ("error", "abort")  # finish reasons of answers that the server gave up


class ServerReportedError(Exception):
    """An error event in the stream."""


@dataclass(frozen=True)
class AnswerEvent:
    """One event of an answer."""

    has_choice: bool = False  # the event has a part of the answer
    has_content: bool = False  # the event has text
    tokens: int | None = None  # number of tokens in the event, if stated
    finish_reason: str | None = None
    prompt_tokens: int | None = None  # of the whole request, from usage
    output_tokens: int | None = None  # of the answer up to here, from usage


def parse_chunk(data: bytes) -> AnswerEvent:
    """Parse an event's data; ValueError if it is no chunk of an answer, ServerReportedError if it is an error."""
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(f"an event that is not JSON: {data[:60]!r}") from None
    if not isinstance(event, dict):
        raise ValueError(f"an event that is no object: {data[:60]!r}")
    if event.get("error"):
        raise ServerReportedError(_message(event["error"]))
    choices = event.get("choices")
    usage = event.get("usage")
    if not isinstance(choices, list) or not (choices or usage):
        return _no_answer(event, data)
    usage = usage if isinstance(usage, dict) else {}
    choice = choices[0] if choices else {}
    if not isinstance(choice, dict):
        raise ValueError(f"a choice that is no object: {data[:60]!r}")
    reason = choice.get("finish_reason")
    if reason in FAILED_REASONS:
        raise ServerReportedError(f"finish_reason {reason}")
    return AnswerEvent(
        has_choice=bool(choices),
        has_content=_has_content(choice),
        tokens=_token_count(choice),
        finish_reason=reason if isinstance(reason, str) else None,
        prompt_tokens=_count(usage.get("prompt_tokens")),
        output_tokens=_count(usage.get("completion_tokens")),
    )


def _no_answer(event: dict[str, Any], data: bytes) -> AnswerEvent:
    """Accept an event with an empty list of choices (some servers start with one); refuse any other."""
    if event.get("choices") == []:
        return AnswerEvent()
    raise ValueError(f"an event without choices: {data[:60]!r}")


def _message(error: object) -> str:
    text = error.get("message") if isinstance(error, dict) else error
    return str(text)[:200]


def _has_content(choice: dict[str, Any]) -> bool:
    """Return whether a choice has text: of a completion, a chat message, or reasoning."""
    delta = choice.get("delta")
    parts = delta if isinstance(delta, dict) else {}
    texts = (choice.get("text"), parts.get("content"), parts.get("reasoning_content"), parts.get("reasoning"))
    return any(isinstance(text, str) and text for text in texts)


def _token_count(choice: dict[str, Any]) -> int | None:
    """Return the number of tokens of a chunk: from its token ids, else from its logprobs, else None."""
    logprobs = choice.get("logprobs")
    listed = logprobs if isinstance(logprobs, dict) else {}
    for tokens in (choice.get("token_ids"), listed.get("tokens"), listed.get("content")):
        if isinstance(tokens, list):
            return len(tokens)
    return None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


class StreamParser:
    """Parses the bytes of an answer; all events that arrive together have the same time."""

    def __init__(self, outcome: RequestOutcome) -> None:
        self._outcome = outcome
        self._events = EventParser()
        self._counted = 0  # output tokens according to the latest usage
        self._waiting: int | None = None  # tokens that arrived without their text
        self.is_finished = False  # a finish reason or [DONE] has arrived

    def take(self, received: bytes, time: float) -> None:
        """Parse received bytes; ValueError or ServerReportedError if they are no answer."""
        for data in self._events.feed(received):
            if data.strip() == DONE:
                self.is_finished = True
            else:
                self._take_chunk(parse_chunk(data), time)

    def _take_chunk(self, chunk: AnswerEvent, time: float) -> None:
        outcome = self._outcome
        if chunk.prompt_tokens is not None:
            outcome.prompt_tokens = chunk.prompt_tokens
        tokens = self._tokens_of(chunk)
        if not chunk.has_choice:
            return
        outcome.last = time
        if tokens is not None:
            self._waiting = (self._waiting or 0) + tokens
        if chunk.has_content:
            outcome.chunks.append(ContentChunk(time, self._waiting if tokens is not None else None))
            self._waiting = None
        self.is_finished |= chunk.finish_reason is not None

    def _tokens_of(self, chunk: AnswerEvent) -> int | None:
        """Return the tokens that the chunk states, else the growth of usage."""
        if chunk.output_tokens is None:
            return chunk.tokens
        grown = chunk.output_tokens - self._counted
        self._counted = self._outcome.usage_tokens = chunk.output_tokens
        return grown if chunk.tokens is None else chunk.tokens
