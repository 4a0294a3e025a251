"""What one event of a streamed answer says."""

import json
from dataclasses import dataclass
from typing import Any

DONE = b"[DONE]"
FAILED_REASONS = ("error", "abort")  # a server's own word for an answer that it gave up


class ServerReportedError(Exception):
    """The server has put an error into the stream."""


@dataclass(frozen=True)
class Chunk:
    """One event of an answer."""

    has_choice: bool = False  # it is part of the answer, not about it
    has_content: bool = False  # it holds text
    tokens: int | None = None  # how many tokens it holds, if it says so
    finish_reason: str | None = None
    prompt_tokens: int | None = None  # of the whole request, from usage
    output_tokens: int | None = None  # of the answer up to here, from usage


def parse_chunk(data: bytes) -> Chunk:
    """An event's data; ValueError if it is no chunk of an answer, ServerReportedError if it is an error."""
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
    return Chunk(
        has_choice=bool(choices),
        has_content=_has_content(choice),
        tokens=_token_count(choice),
        finish_reason=reason if isinstance(reason, str) else None,
        prompt_tokens=_count(usage.get("prompt_tokens")),
        output_tokens=_count(usage.get("completion_tokens")),
    )


def _no_answer(event: dict[str, Any], data: bytes) -> Chunk:
    """An event with an empty list of choices says nothing (some servers open with one); another is refused."""
    if event.get("choices") == []:
        return Chunk()
    raise ValueError(f"an event without choices: {data[:60]!r}")


def _message(error: object) -> str:
    text = error.get("message") if isinstance(error, dict) else error
    return str(text)[:200]


def _has_content(choice: dict[str, Any]) -> bool:
    """Whether there is text in it: a completion's, a chat message's, or that of a model that thinks aloud."""
    delta = choice.get("delta")
    parts = delta if isinstance(delta, dict) else {}
    texts = (choice.get("text"), parts.get("content"), parts.get("reasoning_content"), parts.get("reasoning"))
    return any(isinstance(text, str) and text for text in texts)


def _token_count(choice: dict[str, Any]) -> int | None:
    """Tokens of the chunk: from its token ids if they are there, else from its logprobs."""
    logprobs = choice.get("logprobs")
    said = logprobs if isinstance(logprobs, dict) else {}
    for tokens in (choice.get("token_ids"), said.get("tokens"), said.get("content")):
        if isinstance(tokens, list):
            return len(tokens)
    return None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
