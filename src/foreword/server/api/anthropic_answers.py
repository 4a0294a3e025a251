"""Converts answers of OpenAI's chat route to Anthropic's messages."""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import UNSET

from foreword.engine.messages import AnswerDelta
from foreword.engine.outputs import Answer, Costs
from foreword.server.api.answer_types import AnswerUsage, ChatDelta, ChatMessage, Completion, ToolCall
from foreword.server.api.answering import AnswerJob
from foreword.server.api.chat import ChatDialect
from foreword.server.api.identity import new_id

Json = dict[str, Any]

_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use"}  # all others: the answer was cut


class MessagesDialect:
    """Formats chat answers as one Anthropic message, or its stream events."""

    def __init__(self, job: AnswerJob) -> None:
        assert isinstance(job.dialect, ChatDialect)
        self._inner = job.dialect
        self._prompt_tokens = len(job.requests[0].prompt_token_ids)
        self._id = new_id("msg")
        self._index = -1  # index of the newest block
        self._open: tuple[str, int] | None = None  # type of the open block, and index of its call
        self._has_calls = False
        self._end: Json = {}  # of the answer

    def opening(self) -> Iterable[Json]:
        *_, first = self._inner.opening()
        message = self._message(first, [], AnswerUsage(self._prompt_tokens, 0, self._prompt_tokens))
        yield {"type": "message_start", "message": message}

    def chunk(self, choice: int, delta: AnswerDelta) -> list[Json]:
        frame = self._inner.chunk(choice, delta)
        if frame is None:
            return []
        gained = frame.choices[0]
        new = gained.delta
        assert isinstance(new, ChatDelta)
        calls = new.tool_calls or []
        events: list[Json] = []
        if new.reasoning_content:
            events += self._piece("thinking", {"type": "thinking_delta", "thinking": new.reasoning_content})
        for call in [one for one in calls if one.id is UNSET]:  # continues the open call
            events += self._call_events(call)
        if new.content:
            events += self._piece("text", {"type": "text_delta", "text": new.content})
        for call in [one for one in calls if one.id is not UNSET]:
            events += self._call_events(call)
        if gained.finish_reason is not None:
            self._end = self._ended(frame, gained.finish_reason, gained.stop_reason)
        return events

    def closing(self) -> Iterable[Json]:
        yield from self._close()
        (last,) = self._inner.closing()
        assert isinstance(last.usage, AnswerUsage)
        ended = {name: self._end.pop(name) for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": ended, "usage": _usage(last.usage), **self._end}
        yield {"type": "message_stop"}

    def whole(self, answers: Sequence[Answer], costs: Costs) -> Json:
        frame = self._inner.whole(answers, costs)
        choice = frame.choices[0]
        message = choice.message
        assert isinstance(message, ChatMessage)
        content: list[Json] = []
        if message.reasoning_content:
            content.append(_block("thinking") | {"thinking": message.reasoning_content})
        if message.content:
            content.append({"type": "text", "text": message.content})
        for call in message.tool_calls or []:
            self._has_calls = True
            content.append(_block("tool_use", call) | {"input": call.function.parsed()})
        assert isinstance(frame.usage, AnswerUsage)
        answer = self._message(frame, content, frame.usage)
        return answer | self._ended(frame, choice.finish_reason, choice.stop_reason)

    def _message(self, frame: Completion, content: list[Json], usage: AnswerUsage) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": frame.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    def _ended(self, frame: Completion, reason: str | None, stop: int | str | None) -> Json:
        """Return why the answer ended, and additional fields of the chat route."""
        sequence = stop if isinstance(stop, str) else None
        name = _STOP_REASONS.get(reason or "", "max_tokens")
        if name == "end_turn":
            name = "stop_sequence" if sequence is not None else "tool_use" if self._has_calls else name
        extras = {"timings": frame.timings, "speculation": frame.speculation}
        shown = {key: value for key, value in extras.items() if value is not UNSET}
        return {"stop_reason": name, "stop_sequence": sequence, **shown}

    def _call_events(self, call: ToolCall) -> list[Json]:
        self._has_calls = True
        given = {"type": "input_json_delta", "partial_json": call.function.arguments or ""}
        return self._piece("tool_use", given, call)

    def _piece(self, kind: str, delta: Json, call: ToolCall | None = None) -> list[Json]:
        """Return the events for more text or arguments, starting a block if necessary."""
        place = (kind, call.index if call is not None and isinstance(call.index, int) else 0)
        events = []
        if self._open != place:
            events += self._close()
            self._open, self._index = place, self._index + 1
            start = {"index": self._index, "content_block": _block(kind, call)}
            events.append({"type": "content_block_start", **start})
        return [*events, {"type": "content_block_delta", "index": self._index, "delta": delta}]

    def _close(self) -> list[Json]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._index}]


def _block(kind: str, call: ToolCall | None = None) -> Json:
    """Return a block's initial state."""
    if call is not None:
        return {"type": kind, "id": call.id, "name": call.function.name, "input": {}}
    return (
        {"type": kind, "thinking": "", "signature": ""} if kind == "thinking" else {"type": kind, "text": ""}
    )


def _usage(counted: AnswerUsage) -> Json:
    details = counted.prompt_tokens_details
    cached = 0 if details is UNSET else details["cached_tokens"]
    return {
        "input_tokens": counted.prompt_tokens - cached,
        "output_tokens": counted.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }
