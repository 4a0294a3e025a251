"""Sends the requests of a load test, at given times or a fixed number at once, and reads their streamed answers."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter
from typing import Any

import httpx2

from foreword.bench.prompts import BenchPrompt
from foreword.bench.serve.load import (
    LoadSettings,
    RequestTemplate,
    arrival_times,
    drop_points,
    prompts_in_turn,
)
from foreword.wire.openai_http import EventParser, error_words, refusal_of


class Ending(StrEnum):
    """Result of a request. Latencies and throughput count completed requests only."""

    COMPLETED = "completed"
    DROPPED = "dropped on purpose"
    REFUSED = "HTTP error"
    TIMEOUT = "timeout"
    NO_RESPONSE = "no response"  # no connection, or it broke before the response header
    CUT_OFF = "cut off by the server"  # the connection ended in the middle of the answer
    REPORTED = "error in the stream"  # an event of the stream describes an error
    MALFORMED = "malformed answer"


@dataclass(frozen=True)
class ContentChunk:
    """An event with text."""

    time: float  # arrival in seconds
    tokens: int | None  # tokens of this event and of events without text before it; None: unknown


@dataclass
class RequestOutcome:
    """Result of one request, filled in while the request runs; times are seconds of one monotonic clock."""

    due: float  # scheduled send time, from which latencies count
    sent: float | None = None  # time at which the whole request was sent; None: it was not sent
    ended_at: float = 0.0
    ending: Ending | None = None
    detail: str = ""  # description of a failure
    status: int | None = None  # HTTP status; None: no response header arrived
    retry_after: str | None = None  # Retry-After header of a refusal
    chunks: list[ContentChunk] = field(default_factory=list)
    last_event_time: float | None = None  # arrival of the last event with text or a finish reason
    prompt_tokens: int | None = None  # from usage
    usage_tokens: int | None = None  # output tokens from usage
    drop_after: int | None = (
        None  # chunks with text after which the client disconnects on purpose; None: never
    )

    def end(self, ending: Ending, detail: str = "") -> None:
        self.ending, self.detail = ending, detail


DONE = b"[DONE]"  # data of the event that ends a stream
FAILED_REASONS = ("error", "abort")  # finish reasons of answers that the server aborted


class ServerReportedError(Exception):
    """An event of the stream describes an error."""


@dataclass(frozen=True)
class AnswerEvent:
    """One event of an answer."""

    has_choice: bool = False  # whether `choices` has an entry
    has_content: bool = False  # whether that entry has text
    tokens: int | None = None  # number of tokens in the event, if stated
    finish_reason: str | None = None
    prompt_tokens: int | None = None  # of the whole request, from usage
    output_tokens: int | None = None  # of the answer up to here, from usage


def parse_event(data: bytes) -> AnswerEvent:
    """Parse an event's data; raise ServerReportedError for an error event, ValueError for other invalid events."""
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(f"the event is not JSON: {data[:60]!r}") from None
    if not isinstance(event, dict):
        raise ValueError(f"the event is not a JSON object: {data[:60]!r}")
    if event.get("error"):
        error = event["error"]
        raise ServerReportedError(str(error.get("message") if isinstance(error, dict) else error)[:200])
    choices = event.get("choices")
    usage = event.get("usage")
    if choices == [] and not usage:
        return AnswerEvent()  # some servers start with such an event
    if not isinstance(choices, list):
        raise ValueError(f"the event has no list `choices`: {data[:60]!r}")
    usage = usage if isinstance(usage, dict) else {}
    choice = choices[0] if choices else {}
    if not isinstance(choice, dict):
        raise ValueError(f"the choice is not a JSON object: {data[:60]!r}")
    reason = choice.get("finish_reason")
    if reason in FAILED_REASONS:
        raise ServerReportedError(f"finish_reason {reason}")
    return AnswerEvent(
        has_choice=bool(choices),
        has_content=_has_content(choice),
        tokens=_token_count(choice),
        finish_reason=reason if isinstance(reason, str) else None,
        prompt_tokens=_count_or_none(usage.get("prompt_tokens")),
        output_tokens=_count_or_none(usage.get("completion_tokens")),
    )


def _has_content(choice: dict[str, Any]) -> bool:
    """Return whether a choice has text of a completion, a chat message or reasoning."""
    delta = choice.get("delta")
    parts = delta if isinstance(delta, dict) else {}
    texts = (choice.get("text"), parts.get("content"), parts.get("reasoning_content"), parts.get("reasoning"))
    return any(isinstance(text, str) and text for text in texts)


def _token_count(choice: dict[str, Any]) -> int | None:
    """Return the number of token ids of a choice, otherwise that of its logprobs, otherwise None."""
    logprobs = choice.get("logprobs")
    listed = logprobs if isinstance(logprobs, dict) else {}
    for tokens in (choice.get("token_ids"), listed.get("tokens"), listed.get("content")):
        if isinstance(tokens, list):
            return len(tokens)
    return None


def _count_or_none(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


class StreamParser:
    """Parses the bytes of an answer; all events that arrive together have the same time."""

    def __init__(self, outcome: RequestOutcome) -> None:
        self._outcome = outcome
        self._events = EventParser()
        self._usage_tokens = 0  # output tokens according to the latest usage
        self._tokens_before_text: int | None = None  # tokens of events since the last text; None: unknown
        self.is_finished = False  # a finish reason or [DONE] has arrived

    def feed(self, received: bytes, time: float) -> None:
        """Parse received bytes; raise ServerReportedError for an error event, ValueError for other invalid bytes."""
        for data in self._events.feed(received):
            if data.strip() == DONE:
                self.is_finished = True
            else:
                self._take_event(parse_event(data), time)

    def _take_event(self, event: AnswerEvent, time: float) -> None:
        outcome = self._outcome
        if event.prompt_tokens is not None:
            outcome.prompt_tokens = event.prompt_tokens
        tokens = self._count_tokens(event)
        if not event.has_choice:
            return
        if tokens is not None:
            self._tokens_before_text = (self._tokens_before_text or 0) + tokens
        if event.has_content:
            outcome.chunks.append(
                ContentChunk(time, self._tokens_before_text if tokens is not None else None)
            )
            self._tokens_before_text = None
        if event.has_content or event.finish_reason is not None:  # not the role, which precedes the answer
            outcome.last_event_time = time
        self.is_finished |= event.finish_reason is not None

    def _count_tokens(self, event: AnswerEvent) -> int | None:
        """Record usage; return the number of tokens that the event states, otherwise the increase of usage."""
        if event.output_tokens is None:
            return event.tokens
        increase = event.output_tokens - self._usage_tokens
        self._usage_tokens = self._outcome.usage_tokens = event.output_tokens
        return increase if event.tokens is None else event.tokens


async def send_request(
    client: httpx2.AsyncClient, path: str, body: dict[str, Any], outcome: RequestOutcome, timeout: float
) -> None:
    """Send one request, read its answer, and fill in the outcome; failures are outcomes too."""
    try:
        async with asyncio.timeout(timeout):
            await _read_answer(client, path, body, outcome)
    except TimeoutError:
        outcome.end(Ending.TIMEOUT, f"the answer was not complete after {timeout:g} s")
    except ServerReportedError as error:
        outcome.end(Ending.REPORTED, str(error))
    except ValueError as error:
        outcome.end(Ending.MALFORMED, str(error))
    except httpx2.HTTPError as error:
        outcome.end(Ending.NO_RESPONSE if outcome.status is None else Ending.CUT_OFF, error_words(error))
    outcome.ended_at = perf_counter()


async def _read_answer(
    client: httpx2.AsyncClient, path: str, body: dict[str, object], outcome: RequestOutcome
) -> None:
    parser = StreamParser(outcome)

    async def on_event(name: str, _: object) -> None:
        if name == "http11.send_request_body.complete":
            outcome.sent = perf_counter()

    async with client.stream("POST", path, json=body, extensions={"trace": on_event}) as response:
        outcome.status = response.status_code
        if response.status_code != 200:
            outcome.retry_after = response.headers.get("retry-after")
            return outcome.end(Ending.REFUSED, await refusal_of(response))
        content_type = response.headers.get("content-type", "")
        if not content_type.startswith("text/event-stream"):
            raise ValueError(f"expected text/event-stream, got {content_type or 'no content type'}")
        async for received in response.aiter_bytes():
            parser.feed(received, perf_counter())
            reached_drop_point = outcome.drop_after is not None and len(outcome.chunks) >= outcome.drop_after
            if reached_drop_point and not parser.is_finished:
                return outcome.end(Ending.DROPPED)  # closes the connection, like a client that disconnects
    if not parser.is_finished:
        return outcome.end(Ending.CUT_OFF, "the stream ended before the answer was complete")
    if outcome.last_event_time is None:
        raise ValueError("the stream has neither text nor a finish reason")
    outcome.end(Ending.COMPLETED)
    return None


DELAY_SAMPLE_SECONDS = 0.05  # seconds between two measurements of the event loop's delay

OnOutcome = Callable[[RequestOutcome], None]
Send = Callable[[float], Coroutine[Any, Any, RequestOutcome]]
"""Sends the next request, which is due at this time, and returns its outcome."""


@dataclass(frozen=True)
class LoadRun:
    """Outcomes of a run in sending order, and its duration."""

    outcomes: list[RequestOutcome]
    seconds: float  # from the start to the end of the last request
    loop_delays: list[float]  # sampled delays of the generator's event loop, in seconds


@dataclass(frozen=True)
class LoadGenerator:
    """Sends the requests of one run."""

    client: httpx2.AsyncClient
    template: RequestTemplate
    load: LoadSettings

    async def run(self, prompts: Sequence[BenchPrompt], on_outcome: OnOutcome) -> LoadRun:
        """Generate the load; call `on_outcome` for every request that has ended."""
        template, load = self.template, self.load
        texts = prompts_in_turn(prompts, load.seed)
        drops = drop_points(load.disconnect, template.max_tokens, load.seed)
        requests = enumerate(zip(texts, drops, strict=False))

        async def send(due: float) -> RequestOutcome:
            index, (text, drop_after) = next(requests)
            outcome = RequestOutcome(due, drop_after=drop_after)
            await send_request(self.client, template.path, template.body(text, index), outcome, load.timeout)
            on_outcome(outcome)
            return outcome

        loop_delays: list[float] = []
        sampler = asyncio.create_task(_sample_loop_delays(loop_delays))
        start = perf_counter()
        try:
            outcomes = await (self._closed if load.rate is None else self._open)(send, start)
        finally:
            sampler.cancel()
        seconds = max((outcome.ended_at for outcome in outcomes), default=start) - start
        return LoadRun(sorted(outcomes, key=lambda outcome: outcome.due), seconds, loop_delays)

    async def _open(self, send: Send, start: float) -> list[RequestOutcome]:
        """Send every request at its scheduled time, regardless of the number in flight."""
        async with asyncio.TaskGroup() as group:
            tasks = []
            for offset in arrival_times(self.load):
                due = start + offset
                if (wait := due - perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(group.create_task(send(due)))
        return [task.result() for task in tasks]

    async def _closed(self, send: Send, start: float) -> list[RequestOutcome]:
        """Run a fixed number of clients, each of which sends its next request when the previous one has ended."""
        outcomes: list[RequestOutcome] = []
        permits = self._permits(start)

        async def client() -> None:
            for _ in permits:
                outcomes.append(await send(perf_counter()))

        async with asyncio.TaskGroup() as group:
            for _ in range(self.load.concurrency):
                group.create_task(client())
        return outcomes

    def _permits(self, start: float) -> Iterator[None]:
        """Yield once for every request that may be started; all clients of a closed loop share this iterator."""
        load, started = self.load, 0
        while load.num_requests is None or started < load.num_requests:
            if load.duration is not None and perf_counter() - start >= load.duration:
                return
            started += 1
            yield


async def _sample_loop_delays(loop_delays: list[float]) -> None:
    """Append delays of the event loop in seconds: measured arrival times may be late by as much."""
    while True:
        due = perf_counter() + DELAY_SAMPLE_SECONDS
        await asyncio.sleep(DELAY_SAMPLE_SECONDS)
        loop_delays.append(max(0.0, perf_counter() - due))
