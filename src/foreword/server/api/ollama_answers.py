"""Ollama's response format, made from the responses of OpenAI's routes."""

from collections.abc import Iterable, Mapping, Sequence
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
    CompletionLogprobs,
)
from foreword.server.api.answering import AnswerJob
from foreword.server.api.call_format import is_object
from foreword.server.api.chat import ChatDialect
from foreword.server.api.completions import CompletionDialect

Json = dict[str, Any]


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def loaded(model: object, *, is_chat: bool) -> Json:
    """Return the response to a request that only loads a model."""
    empty = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return {"model": model, "created_at": _now(), **empty, "done": True, "done_reason": "load"}


def _logprobs(choice: Choice) -> Json:
    """Return the field with an answer's log-probabilities, if there are any."""
    logprobs = choice.logprobs
    if isinstance(logprobs, ChatLogprobs):
        return {"logprobs": logprobs.content} if logprobs.content else {}
    if not isinstance(logprobs, CompletionLogprobs) or not logprobs.tokens:
        return {}
    columns = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    return {"logprobs": [_token_entry(token, value) | _top_logprobs(top) for token, value, top in columns]}


def _top_logprobs(likeliest: Mapping[str, float] | None) -> Json:
    """Return the field with a token's likeliest alternatives, if there are any."""
    if not likeliest:
        return {}
    return {"top_logprobs": [_token_entry(token, logprob) for token, logprob in likeliest.items()]}


def _token_entry(token: str, logprob: float | None) -> Json:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def _is_complete(call: CalledTool) -> bool:
    arguments = call.arguments or ""
    return arguments.endswith("}") and is_object(arguments)  # parses long arguments only at a closing brace


class OllamaDialect:
    """Formats answers for Ollama: converts what the dialect of OpenAI's chat or completions route returns."""

    def __init__(self, job: AnswerJob, *, is_chat: bool) -> None:
        assert isinstance(job.dialect, ChatDialect | CompletionDialect)
        self._inner = job.dialect
        self._is_chat = is_chat
        self._began = monotonic_ns()
        self._calls: list[CalledTool] = []  # calls that were not sent yet: Ollama sends only complete ones
        self._end_fields: Json = {}  # fields of the stream's last event

    def opening(self) -> Iterable[Json]:
        return ()

    def chunk(self, choice: int, delta: AnswerDelta) -> list[Json]:
        completion = self._inner.chunk(choice, delta)
        if not isinstance(completion, Completion):
            return []
        part = completion.choices[0]
        message = part.delta if isinstance(part.delta, ChatDelta) else ChatDelta(content=part.text)
        is_end = part.finish_reason is not None
        for call in message.tool_calls or []:
            if call.id:
                self._calls.append(CalledTool(call.function.name, ""))
            self._calls[-1].arguments = (self._calls[-1].arguments or "") + (call.function.arguments or "")
        calls, self._calls = self._calls, []
        if calls and not is_end and not _is_complete(calls[-1]):
            self._calls = [calls.pop()]
        if is_end:
            self._end_fields = self._fields_at_end(completion, part)
        logprobs = _logprobs(part)
        text, thinking = message.content or "", message.reasoning_content or ""
        if not (text or thinking or calls or logprobs):
            return []
        return [self._response(completion, text, thinking, calls) | logprobs]

    def closing(self) -> Iterable[Json]:
        (last,) = self._inner.closing()
        yield self._response(last, "", "", []) | self._end_fields | self._token_counts(last)

    def whole(self, answers: Sequence[Answer], costs: Costs) -> Json:
        completion = self._inner.whole(answers, costs)
        choice = completion.choices[0]
        message = choice.message or ChatMessage(choice.text or "")
        calls = [call.function for call in message.tool_calls or []]
        response = self._response(completion, message.content or "", message.reasoning_content or "", calls)
        end_fields = self._fields_at_end(completion, choice)
        return response | _logprobs(choice) | end_fields | self._token_counts(completion)

    def _response(
        self, completion: Completion, text: str, thinking: str, calls: Sequence[CalledTool]
    ) -> Json:
        """Return an event with new content, or a response with all of it."""
        common: Json = {"model": completion.model, "created_at": _now()}
        thought = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {**common, "response": text, **thought, "done": False}
        # A call that the token limit cut off is left out, since its arguments are not JSON.
        complete = [call for call in calls if is_object(call.arguments or "{}")]
        functions = [{"function": {"name": call.name, "arguments": call.parsed()}} for call in complete]
        tool_calls = {"tool_calls": functions} if functions else {}
        message = {"role": "assistant", "content": text, **thought, **tool_calls}
        return {**common, "message": message, "done": False}

    def _fields_at_end(self, completion: Completion, choice: Choice) -> Json:
        """Return why the answer ended, and its times in nanoseconds."""
        timings = completion.timings or {}
        return {
            "done": True,
            "done_reason": "stop" if choice.finish_reason in ("stop", "tool_calls") else "length",
            "total_duration": monotonic_ns() - self._began,
            "load_duration": 0,
            "prompt_eval_duration": int(timings.get("prompt_ms", 0) * 1e6),
            "eval_duration": int(timings.get("predicted_ms", 0) * 1e6),
        }

    def _token_counts(self, completion: Completion) -> Json:
        usage = completion.usage
        assert isinstance(usage, AnswerUsage)
        return {"prompt_eval_count": usage.prompt_tokens, "eval_count": usage.completion_tokens}
