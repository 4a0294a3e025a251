"""Sends the requests of a load test in an open or a closed loop, and reads their streamed answers."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter
from typing import Any

import httpx2

from foreword.bench.prompts import BenchPrompt
from foreword.bench.serve.load import LoadSettings, Question, arrival_times, drop_points, prompts_in_turn
from foreword.wire.openai_http import EventParser, error_words, refusal_of


class Ending(StrEnum):
    """Result of a request. Latencies and throughput count completed requests only."""

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
    tokens: int | None  # tokens of this chunk and of chunks without text before it; None: unknown


@dataclass
class RequestOutcome:
    """One request, filled in while it runs; times are seconds of one monotonic clock."""

    due: float  # scheduled send time, from which latencies count
    sent: float | None = None  # end of sending the request; None: it was not sent
    ended_at: float = 0.0
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
FAILED_REASONS = ("error", "abort")
"""Finish reasons of answers that the server gave up."""


class ServerReportedError(Exception):
    """The stream has an error event."""


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
    """Parse an event's data; raise ServerReportedError for an error event, ValueError for other invalid events."""
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(f"an event that is not JSON: {data[:60]!r}") from None
    if not isinstance(event, dict):
        raise ValueError(f"an event that is no object: {data[:60]!r}")
    if event.get("error"):
        raise ServerReportedError(_message(event["error"]))
    choices, usage = event.get("choices"), _object(event.get("usage"))
    if not isinstance(choices, list):
        raise ValueError(f"an event without choices: {data[:60]!r}")
    choice = choices[0] if choices else {}  # some servers start with an event without any
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


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _message(error: object) -> str:
    text = error.get("message") if isinstance(error, dict) else error
    return str(text)[:200]


def _has_content(choice: dict[str, Any]) -> bool:
    """Return whether a choice has text of a completion, a chat message or reasoning."""
    parts = _object(choice.get("delta"))
    texts = (choice.get("text"), parts.get("content"), parts.get("reasoning_content"), parts.get("reasoning"))
    return any(isinstance(text, str) and text for text in texts)


def _token_count(choice: dict[str, Any]) -> int | None:
    """Return the number of token ids of a chunk, otherwise that of its logprobs, otherwise None."""
    listed = _object(choice.get("logprobs"))
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
        self._waiting: int | None = None  # tokens that arrived without their text
        self.is_finished = False  # a finish reason or [DONE] has arrived

    def take(self, received: bytes, time: float) -> None:
        """Parse received bytes; raise ValueError or ServerReportedError if they are no answer."""
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
        """Return the number of tokens that the chunk states, otherwise the increase of usage."""
        if chunk.output_tokens is None:
            return chunk.tokens
        grown = chunk.output_tokens - (self._outcome.usage_tokens or 0)
        self._outcome.usage_tokens = chunk.output_tokens
        return grown if chunk.tokens is None else chunk.tokens


async def ask(
    client: httpx2.AsyncClient, path: str, body: dict[str, Any], outcome: RequestOutcome, timeout: float
) -> None:
    """Send one request, read its answer, and fill in the outcome; failures are outcomes too."""
    try:
        async with asyncio.timeout(timeout):
            ended = await _read_answer(client, path, body, outcome)
    except TimeoutError:
        ended = Ending.TIMEOUT, f"not over after {timeout:g} s"
    except ServerReportedError as error:
        ended = Ending.REPORTED, str(error)
    except ValueError as error:
        ended = Ending.MALFORMED, str(error)
    except httpx2.HTTPError as error:
        ended = Ending.NO_CONNECTION if outcome.status is None else Ending.CUT_OFF, error_words(error)
    outcome.ending, outcome.detail = ended
    outcome.ended_at = perf_counter()


async def _read_answer(
    client: httpx2.AsyncClient, path: str, body: dict[str, object], outcome: RequestOutcome
) -> tuple[Ending, str]:
    reader = StreamParser(outcome)

    async def on_event(name: str, _: object) -> None:
        if name == "http11.send_request_body.complete":
            outcome.sent = perf_counter()

    async with client.stream("POST", path, json=body, extensions={"trace": on_event}) as response:
        outcome.status = response.status_code
        if response.status_code != 200:
            outcome.retry_after = response.headers.get("retry-after")
            return Ending.REFUSED, await refusal_of(response)
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise ValueError(f"not a stream of events but {kind or 'of no type'}")
        async for received in response.aiter_bytes():
            reader.take(received, perf_counter())
            is_dropped = outcome.drop_after is not None and len(outcome.chunks) >= outcome.drop_after
            if is_dropped and not reader.is_finished:
                return Ending.DROPPED, ""  # closes the connection, like a client that disconnects
    if not reader.is_finished:
        return Ending.CUT_OFF, "the stream ended before the answer did"
    if outcome.last is None:
        raise ValueError("a stream without an answer")
    return Ending.COMPLETED, ""


WATCH_INTERVAL = 0.05
"""Seconds between two measurements of the event loop's delay."""

OnOutcome = Callable[[RequestOutcome], None]
Send = Callable[[float], Coroutine[Any, Any, RequestOutcome]]
"""Sends the next request, which is due at this time, and returns its outcome."""


@dataclass(frozen=True)
class LoadRun:
    """Outcomes of a run in sending order, and its duration."""

    outcomes: list[RequestOutcome]
    seconds: float  # from the start to the end of the last request
    read_late: list[float]  # sampled delays of the generator's event loop, in seconds


@dataclass(frozen=True)
class LoadGenerator:
    """Sends the requests of one run."""

    client: httpx2.AsyncClient
    question: Question
    load: LoadSettings

    async def run(self, prompts: Sequence[BenchPrompt], on_outcome: OnOutcome) -> LoadRun:
        """Generate the load; call `on_outcome` for every request that has ended."""
        question, load = self.question, self.load
        texts = prompts_in_turn(prompts, load.seed)
        drops = drop_points(load.disconnect, question.max_tokens, load.seed)
        numbered = enumerate(zip(texts, drops, strict=False))

        async def send(due: float) -> RequestOutcome:
            index, (text, drop_after) = next(numbered)
            outcome = RequestOutcome(due, drop_after=drop_after)
            await ask(self.client, question.path, question.body(text, index), outcome, load.timeout)
            on_outcome(outcome)
            return outcome

        late: list[float] = []
        watch = asyncio.create_task(_watch_lateness(late))
        start = perf_counter()
        try:
            outcomes = await (self._closed if load.rate is None else self._open)(send, start)
        finally:
            watch.cancel()
        seconds = max((outcome.ended_at for outcome in outcomes), default=start) - start
        return LoadRun(sorted(outcomes, key=lambda outcome: outcome.due), seconds, late)

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
        """Run a fixed number of clients, each of which sends its next request when its last one has ended."""
        outcomes: list[RequestOutcome] = []
        turns = self._turns(start)

        async def client() -> None:
            for _ in turns:
                outcomes.append(await send(perf_counter()))

        async with asyncio.TaskGroup() as group:
            for _ in range(self.load.concurrency):
                group.create_task(client())
        return outcomes

    def _turns(self, start: float) -> Iterator[None]:
        """Yield once for every request that may still be started; shared by all clients of a closed loop."""
        load, started = self.load, 0
        while load.num_requests is None or started < load.num_requests:
            if load.duration is not None and perf_counter() - start >= load.duration:
                return
            started += 1
            yield


async def _watch_lateness(late: list[float]) -> None:
    """Record delays of the event loop, which may make measured arrival times late."""
    while True:
        due = perf_counter() + WATCH_INTERVAL
        await asyncio.sleep(WATCH_INTERVAL)
        late.append(max(0.0, perf_counter() - due))
