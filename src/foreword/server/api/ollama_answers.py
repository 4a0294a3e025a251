"""Formats answers of OpenAI's routes for Ollama's API."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from time import monotonic_ns
from typing import Any

from foreword.engine.messages import AnswerDelta
from foreword.engine.outputs import Answer, Costs
from foreword.server.api.answer_types import (
    AnswerUsage,
    CalledTool,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Choice,
    Completion,
)
from foreword.server.api.answering import AnswerJob
from foreword.server.api.chat import ChatDialect
from foreword.server.api.completions import CompletionDialect
from foreword.server.api.untagged_calls import is_object

Json = dict[str, Any]


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def loaded(model: object, *, is_chat: bool) -> Json:
    """Return the response to a request that only loads a model."""
    empty = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return {"model": model, "created_at": _now(), **empty, "done": True, "done_reason": "load"}


def _logprobs(choice: Choice) -> Json:
    """Return the log-probabilities of a chat answer, which have OpenAI's format."""
    scores = choice.logprobs
    return {"logprobs": scores.content} if isinstance(scores, ChatLogprobs) and scores.content else {}


class OllamaDialect:
    """Formats answers of the chat route or of `/v1/completions`."""

    def __init__(self, job: AnswerJob, *, is_chat: bool) -> None:
        assert isinstance(job.dialect, ChatDialect | CompletionDialect)
        self._inner = job.dialect
        self._is_chat = is_chat
        self._began = monotonic_ns()
        self._calls: list[CalledTool] = []  # started, not reported yet
        self._end: Json = {}  # of the answer

    def opening(self) -> Iterable[Json]:
        return ()

    def chunk(self, choice: int, delta: AnswerDelta) -> list[Json]:
        frame = self._inner.chunk(choice, delta)
        if not isinstance(frame, Completion):
            return []
        gained = frame.choices[0]
        message = gained.delta if isinstance(gained.delta, ChatDelta) else ChatDelta(content=gained.text)
        is_end = gained.finish_reason is not None
        for call in message.tool_calls or []:
            if call.id:
                self._calls.append(CalledTool(call.function.name, ""))
            self._calls[-1].arguments = (self._calls[-1].arguments or "") + (call.function.arguments or "")
        whole = len(self._calls) if is_end or message.content else max(len(self._calls) - 1, 0)
        calls, self._calls = self._calls[:whole], self._calls[whole:]
        if is_end:
            self._end = self._ended(frame, gained)
        scores = _logprobs(gained)
        if not (message.content or message.reasoning_content or calls or scores):
            return []
        return [self._frame(frame, message.content or "", message.reasoning_content or "", calls) | scores]

    def closing(self) -> Iterable[Json]:
        (last,) = self._inner.closing()
        yield self._frame(last, "", "", []) | self._end | self._counted(last)

    def whole(self, answers: Sequence[Answer], costs: Costs) -> Json:
        frame = self._inner.whole(answers, costs)
        choice = frame.choices[0]
        message = choice.message or ChatMessage(choice.text or "")
        calls = [call.function for call in message.tool_calls or []]
        reworded = self._frame(frame, message.content or "", message.reasoning_content or "", calls)
        return reworded | _logprobs(choice) | self._ended(frame, choice) | self._counted(frame)

    def _frame(self, frame: Completion, text: str, thinking: str, calls: Sequence[CalledTool]) -> Json:
        named: Json = {"model": frame.model, "created_at": _now()}
        thought = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {**named, "response": text, **thought, "done": False}
        # A call that was cut has no usable arguments.
        whole = [call for call in calls if is_object(call.arguments or "{}")]
        called = [{"function": {"name": call.name, "arguments": call.parsed()}} for call in whole]
        calls_made = {"tool_calls": called} if called else {}
        message = {"role": "assistant", "content": text, **thought, **calls_made}
        return {**named, "message": message, "done": False}

    def _ended(self, frame: Completion, choice: Choice) -> Json:
        """Return why the answer ended, and its times in nanoseconds."""
        timings = frame.timings or {}
        return {
            "done": True,
            "done_reason": "stop" if choice.finish_reason in ("stop", "tool_calls") else "length",
            "total_duration": monotonic_ns() - self._began,
            "load_duration": 0,
            "prompt_eval_duration": int(timings.get("prompt_ms", 0) * 1e6),
            "eval_duration": int(timings.get("predicted_ms", 0) * 1e6),
        }

    def _counted(self, frame: Completion) -> Json:
        assert isinstance(frame.usage, AnswerUsage)
        return {"prompt_eval_count": frame.usage.prompt_tokens, "eval_count": frame.usage.completion_tokens}
