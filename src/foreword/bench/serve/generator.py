"""The two loops that make the load."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import httpx2

from foreword.bench.drafters.prompts import BenchPrompt
from foreword.bench.serve.arrivals import arrival_times, drop_points, prompts_in_turn
from foreword.bench.serve.client import Request, ask
from foreword.bench.serve.outcome import Outcome
from foreword.bench.serve.settings import Load, Question

WATCH_INTERVAL = 0.05  # seconds between two looks at the loop's own lateness
OnOutcome = Callable[[Outcome], None]


@dataclass(frozen=True)
class Run:
    """All outcomes of a run, in the order of sending, and how long it took."""

    outcomes: list[Outcome]
    seconds: float  # from the start until the last request was over
    read_late: list[float]  # seconds by which the generator's loop came late to something, sampled


class LoadGenerator:
    """Sends the requests of one run."""

    def __init__(self, client: httpx2.AsyncClient, question: Question, load: Load) -> None:
        self._client = client
        self._question = question
        self._load = load

    async def run(self, prompts: Sequence[BenchPrompt], on_outcome: OnOutcome) -> Run:
        """Make the load; `on_outcome` hears of every request that is over."""
        texts = prompts_in_turn(prompts, self._load.seed)
        drops = drop_points(self._load.disconnect, self._question.max_tokens, self._load.seed)
        numbered = enumerate(zip(texts, drops, strict=False))

        def next_request(due: float) -> Request:
            index, (text, drop_after) = next(numbered)
            return Request(index, text, due, drop_after)

        late: list[float] = []
        watch = asyncio.create_task(_watch_lateness(late))
        start = perf_counter()
        try:
            loop = self._closed if self._load.rate is None else self._open
            outcomes = await loop(next_request, start, on_outcome)
        finally:
            watch.cancel()
        seconds = max((outcome.over for outcome in outcomes), default=start) - start
        return Run(sorted(outcomes, key=lambda outcome: outcome.due), seconds, late)

    async def _ask(self, request: Request, on_outcome: OnOutcome) -> Outcome:
        outcome = await ask(self._client, self._question, request, self._load.timeout)
        on_outcome(outcome)
        return outcome

    async def _open(
        self, next_request: Callable[[float], Request], start: float, on_outcome: OnOutcome
    ) -> list[Outcome]:
        """Every request is sent when it is due, however many are under way."""
        async with asyncio.TaskGroup() as group:
            tasks = []
            for offset in arrival_times(self._load):
                due = start + offset
                if (wait := due - perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(group.create_task(self._ask(next_request(due), on_outcome)))
        return [task.result() for task in tasks]

    async def _closed(
        self, next_request: Callable[[float], Request], start: float, on_outcome: OnOutcome
    ) -> list[Outcome]:
        """So many clients, each of which sends its next request when its last one is over."""
        outcomes: list[Outcome] = []
        turns = self._turns(start)

        async def client() -> None:
            for _ in turns:
                outcomes.append(await self._ask(next_request(perf_counter()), on_outcome))

        async with asyncio.TaskGroup() as group:
            for _ in range(self._load.concurrency):
                group.create_task(client())
        return outcomes

    def _turns(self, start: float) -> Iterator[None]:
        """One item for every request that may still be started; shared by all clients of a closed loop."""
        load, started = self._load, 0
        while load.num_requests is None or started < load.num_requests:
            if load.duration is not None and perf_counter() - start >= load.duration:
                return
            started += 1
            yield


async def _watch_lateness(late: list[float]) -> None:
    """Notes by how much the loop oversleeps: an answer that comes meanwhile is seen as late as that."""
    while True:
        due = perf_counter() + WATCH_INTERVAL
        await asyncio.sleep(WATCH_INTERVAL)
        late.append(max(0.0, perf_counter() - due))
