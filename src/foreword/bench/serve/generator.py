"""Sends the requests of a load test, in an open or a closed loop."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import httpx2

from foreword.bench.prompts import BenchPrompt
from foreword.bench.serve.answer import Ending, RequestOutcome, ServerReportedError, StreamParser
from foreword.bench.serve.load import LoadSettings, Question, arrival_times, drop_points, prompts_in_turn
from foreword.wire.openai_http import error_words, refusal_of


@dataclass(frozen=True)
class LoadRequest:
    """A request to be sent."""

    index: int
    prompt: str
    due: float  # on the clock of perf_counter
    drop_after: int | None = None  # disconnect after this many chunks of text


class _Failure(Exception):  # noqa: N818 - never leaves this file
    """A request without a complete answer, and the reason."""

    def __init__(self, ending: Ending, detail: str) -> None:
        super().__init__(detail)
        self.ending = ending


async def ask(
    client: httpx2.AsyncClient, question: Question, request: LoadRequest, timeout: float
) -> RequestOutcome:
    """Send one request and read its answer; a failure is an outcome too."""
    outcome = RequestOutcome(due=request.due, drop_after=request.drop_after)
    body = question.body(request.prompt, request.index)
    try:
        async with asyncio.timeout(timeout):
            await _read_answer(client, question.path, body, outcome)
    except TimeoutError:
        outcome.ending, outcome.detail = Ending.TIMEOUT, f"not over after {timeout:g} s"
    except _Failure as failure:
        outcome.ending, outcome.detail = failure.ending, str(failure)
    except ServerReportedError as error:
        outcome.ending, outcome.detail = Ending.REPORTED, str(error)
    except ValueError as error:
        outcome.ending, outcome.detail = Ending.MALFORMED, str(error)
    except httpx2.HTTPError as error:
        outcome.ending, outcome.detail = _transport_ending(outcome), error_words(error)
    outcome.ended_at = perf_counter()
    return outcome


async def _read_answer(
    client: httpx2.AsyncClient, path: str, body: dict[str, object], outcome: RequestOutcome
) -> None:
    reader = StreamParser(outcome)

    async def on_event(name: str, _: object) -> None:
        if name == "http11.send_request_body.complete":
            outcome.sent = perf_counter()

    async with client.stream("POST", path, json=body, extensions={"trace": on_event}) as response:
        outcome.status = response.status_code
        if response.status_code != 200:
            outcome.retry_after = response.headers.get("retry-after")
            raise _Failure(Ending.REFUSED, await refusal_of(response))
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise _Failure(Ending.MALFORMED, f"not a stream of events but {kind or 'of no type'}")
        async for received in response.aiter_bytes():
            reader.take(received, perf_counter())
            if _is_to_be_dropped(outcome) and not reader.is_finished:
                outcome.ending = Ending.DROPPED
                return  # closes the connection, as a client does that leaves
    if not reader.is_finished:
        raise _Failure(Ending.CUT_OFF, "the stream ended before the answer did")
    if outcome.last is None:
        raise _Failure(Ending.MALFORMED, "a stream without an answer")
    outcome.ending = Ending.COMPLETED


def _is_to_be_dropped(outcome: RequestOutcome) -> bool:
    return outcome.drop_after is not None and len(outcome.chunks) >= outcome.drop_after


def _transport_ending(outcome: RequestOutcome) -> Ending:
    return Ending.NO_CONNECTION if outcome.status is None else Ending.CUT_OFF


WATCH_INTERVAL = 0.05  # seconds between two measurements of the event loop's delay
OnOutcome = Callable[[RequestOutcome], None]


@dataclass(frozen=True)
class LoadRun:
    """Outcomes of a run in sending order, and its duration."""

    outcomes: list[RequestOutcome]
    seconds: float  # from the start to the end of the last request
    read_late: list[float]  # sampled delays of the generator's event loop, in seconds


class LoadGenerator:
    """Sends the requests of one run."""

    def __init__(self, client: httpx2.AsyncClient, question: Question, load: LoadSettings) -> None:
        self._client = client
        self._question = question
        self._load = load

    async def run(self, prompts: Sequence[BenchPrompt], on_outcome: OnOutcome) -> LoadRun:
        """Generate the load; call `on_outcome` for every request that has ended."""
        texts = prompts_in_turn(prompts, self._load.seed)
        drops = drop_points(self._load.disconnect, self._question.max_tokens, self._load.seed)
        numbered = enumerate(zip(texts, drops, strict=False))

        def next_request(due: float) -> LoadRequest:
            index, (text, drop_after) = next(numbered)
            return LoadRequest(index, text, due, drop_after)

        late: list[float] = []
        watch = asyncio.create_task(_watch_lateness(late))
        start = perf_counter()
        try:
            loop = self._closed if self._load.rate is None else self._open
            outcomes = await loop(next_request, start, on_outcome)
        finally:
            watch.cancel()
        seconds = max((outcome.ended_at for outcome in outcomes), default=start) - start
        return LoadRun(sorted(outcomes, key=lambda outcome: outcome.due), seconds, late)

    async def _ask(self, request: LoadRequest, on_outcome: OnOutcome) -> RequestOutcome:
        outcome = await ask(self._client, self._question, request, self._load.timeout)
        on_outcome(outcome)
        return outcome

    async def _open(
        self, next_request: Callable[[float], LoadRequest], start: float, on_outcome: OnOutcome
    ) -> list[RequestOutcome]:
        """Send every request at its scheduled time, regardless of the number in flight."""
        async with asyncio.TaskGroup() as group:
            tasks = []
            for offset in arrival_times(self._load):
                due = start + offset
                if (wait := due - perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(group.create_task(self._ask(next_request(due), on_outcome)))
        return [task.result() for task in tasks]

    async def _closed(
        self, next_request: Callable[[float], LoadRequest], start: float, on_outcome: OnOutcome
    ) -> list[RequestOutcome]:
        """Run a fixed number of clients; each sends its next request when its last one has ended."""
        outcomes: list[RequestOutcome] = []
        turns = self._turns(start)

        async def client() -> None:
            for _ in turns:
                outcomes.append(await self._ask(next_request(perf_counter()), on_outcome))

        async with asyncio.TaskGroup() as group:
            for _ in range(self._load.concurrency):
                group.create_task(client())
        return outcomes

    def _turns(self, start: float) -> Iterator[None]:
        """Yield once for every request that may still be started; shared by all clients of a closed loop."""
        load, started = self._load, 0
        while load.num_requests is None or started < load.num_requests:
            if load.duration is not None and perf_counter() - start >= load.duration:
                return
            started += 1
            yield


async def _watch_lateness(late: list[float]) -> None:
    """Record delays of the event loop, by which arrival times may be late."""
    while True:
        due = perf_counter() + WATCH_INTERVAL
        await asyncio.sleep(WATCH_INTERVAL)
        late.append(max(0.0, perf_counter() - due))
