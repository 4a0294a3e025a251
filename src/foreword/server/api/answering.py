"""Generates answers for validated requests, streamed or complete; a dialect formats them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from foreword.engine.messages import AnswerDelta, NewRequest
from foreword.engine.outputs import Answer, Costs
from foreword.engine.text import TokenTexts
from foreword.errors import EngineUnavailable, ForewordError, RequestError
from foreword.server.api.answer_types import Dialect
from foreword.server.api.streaming import (
    EventStream,
    Framing,
    StreamPart,
    cancel_on_disconnect,
    framing_of,
    send_at_once,
    send_evenly,
)
from foreword.server.context import ServerContext
from foreword.server.errors import ApiError, as_api_error
from foreword.server.request_meter import RequestMeter


class UnsatisfiableRequest(RequestError):  # noqa: N818 - the request, not the error
    """The request's own parameters leave no token to generate."""


_INLINE_LOGPROBS = 64
"""Log-probabilities of more tokens than this are formatted in a thread, so that other requests do not wait."""


@dataclass(frozen=True)
class AnswerJob:
    """A validated and tokenized request."""

    requests: Sequence[NewRequest]  # one per prompt
    dialect: Dialect
    stream: bool


async def respond(context: ServerContext, request: Request, job: AnswerJob, admission: ExitStack) -> Response:
    """Return the response to a job; `admission` is released after its last byte."""
    if not job.stream:
        body = await cancel_on_disconnect(request, _gather(context, job))
        return Response(body, media_type="application/json")
    path = request.url.path
    framing = framing_of(path)
    if context.settings.stream_pacing == "even":
        events = send_evenly(_parts(context, job, path, split=True), context.pace, framing.blank)
    else:
        events = send_at_once(_parts(context, job, path))
    # Send nothing before the engine has accepted the request, so that a refusal has its own status.
    first = await cancel_on_disconnect(request, anext(events))
    return EventStream(first, events, admission.pop_all(), framing.media_type)


async def _gather(context: ServerContext, job: AnswerJob) -> bytes:
    """Wait until all answers have ended; return the body of the response."""
    n = job.requests[0].params.n
    costs = Costs(n * len(job.requests))
    answers = [Answer(index) for _ in job.requests for index in range(n)]
    async with aclosing(all_deltas(context, job.requests)) as deltas:
        async for prompt, delta in deltas:
            answers[prompt * n + delta.index].take(delta)
            costs.note(delta)
    logprobs = sum(len(answer.logprobs) + len(answer.prompt_logprobs) for answer in answers)
    return await _encoded(logprobs, lambda: msgspec.json.encode(job.dialect.whole(answers, costs)))


async def _encoded(logprobs: int, encode: Callable[[], bytes]) -> bytes:
    """Return the result of `encode`, which is called in a thread if there are many log-probabilities."""
    return encode() if logprobs <= _INLINE_LOGPROBS else await asyncio.to_thread(encode)


async def _parts(
    context: ServerContext, job: AnswerJob, path: str, split: bool = False
) -> AsyncGenerator[StreamPart, None]:
    """Yield the events of a stream; with `split`, one event per token.

    After the first event, an exception becomes an event, since the status has been sent.
    """
    n = job.requests[0].params.n
    texts = [TokenTexts(context.prompts.tokenizer) for _ in range(n * len(job.requests))] if split else []
    framing, has_begun = framing_of(path), False
    try:
        async with aclosing(all_deltas(context, job.requests)) as deltas:
            async for prompt, delta in deltas:
                events = [] if has_begun else [framing.write(value) for value in job.dialect.opening()]
                choice = prompt * n + delta.index
                for token_delta in texts[choice].split(delta) if split else [delta]:
                    encode = partial(_chunk, job, framing, choice, token_delta)
                    events.append(await _encoded(len(token_delta.prompt_logprobs), encode))
                if any(events):
                    has_begun = True
                    yield StreamPart([event for event in events if event])
        last = b"".join(map(framing.write, job.dialect.closing())) + framing.end
        yield StreamPart([last], is_end=True)
    except Exception as error:
        if not has_begun:
            raise
        yield StreamPart([framing.write(as_api_error(error).body(path)) + framing.end], is_end=True)


def _chunk(job: AnswerJob, framing: Framing, choice: int, delta: AnswerDelta) -> bytes:
    """Return the encoded events for a delta of a choice; empty: nothing to send."""
    chunk = job.dialect.chunk(choice, delta)
    if isinstance(chunk, list):
        return b"".join(map(framing.write, chunk))
    return b"" if chunk is None else framing.write(chunk)


async def all_deltas(
    context: ServerContext, requests: Sequence[NewRequest]
) -> AsyncGenerator[tuple[int, AnswerDelta], None]:
    """Yield (prompt index, delta) of all requests as the deltas arrive; if a request fails, raise its error."""
    if len(requests) == 1:
        async with aclosing(_measured(context, requests[0])) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    inbox: asyncio.Queue[tuple[int, AnswerDelta | Exception | None]] = asyncio.Queue()
    tasks = [
        asyncio.ensure_future(_collect(context, request, prompt, inbox))
        for prompt, request in enumerate(requests)
    ]
    try:
        unfinished = len(requests)
        while unfinished:
            prompt, item = await inbox.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                unfinished -= 1
            else:
                yield prompt, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _collect(
    context: ServerContext,
    request: NewRequest,
    prompt: int,
    inbox: "asyncio.Queue[tuple[int, AnswerDelta | Exception | None]]",
) -> None:
    """Put a request's deltas into the inbox, then None, or the error with which it fails."""
    try:
        async with aclosing(_measured(context, request)) as deltas:
            async for delta in deltas:
                inbox.put_nowait((prompt, delta))
        inbox.put_nowait((prompt, None))
    except Exception as error:
        inbox.put_nowait((prompt, error))


async def _measured(context: ServerContext, request: NewRequest) -> AsyncGenerator[AnswerDelta, None]:
    """Yield a request's deltas and update the metrics; raise if an answer ends with an error."""
    settings = context.settings
    meter = RequestMeter(context.metrics, request, settings.default_method or "")
    try:
        async with aclosing(context.engine.submit(request, meter.note_late)) as deltas:
            async for delta in deltas:
                meter.note(delta)
                if delta.finish_reason == "error":
                    raise _failure(delta)
                if delta.finish_reason == "deadline" and delta.stats and not delta.stats.output_tokens:
                    raise ApiError(504, delta.error or "the deadline has passed", code="deadline_exceeded")
                if delta.finish_reason == "abort":
                    raise ApiError(503, "the server stopped before the answer was finished", code="aborted")
                yield delta
    except UnsatisfiableRequest:
        raise  # counted as a failed answer
    except RequestError:
        meter.note_refused()
        raise
    except EngineUnavailable:
        meter.note_engine_lost()
        raise
    finally:
        meter.note_closed()


def _failure(delta: AnswerDelta) -> ForewordError:
    """Return the error to raise for an answer that ended with an error."""
    why = delta.error or "the engine could not finish this answer"
    if delta.is_request_error:
        return UnsatisfiableRequest(why, delta.error_param)
    return ApiError(500, why, code="engine_error")
