"""Sends traffic that shifts to a server that learns, and compares its latency with that of a server that does not."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import fmean
from time import perf_counter, sleep
from typing import Any, NamedTuple, Protocol

from foreword.bench.learning.processes import stopped
from foreword.bench.learning.traffic import ShiftedTraffic
from foreword.bench.serve.load import LoadSettings, arrival_times
from foreword.bench.serve.report import Spread, spread
from foreword.bench.server_overhead import ServedModel
from foreword.bench.skeleton import check_least
from foreword.errors import ForewordError, RequestError
from foreword.progress import StageProgress
from foreword.wire.openai_http import open_client, refusal_of

WARM_UP = 4  # requests one after another that determine the rate; one more comes first and does not count
POLL_SECONDS = 1.0  # between two reports while the end of a training is awaited
TRAINS = ("training", "paused")  # states of a server with a training that has not ended


class TimedAnswer(NamedTuple):
    """An answer, and its latency from when its request was due."""

    text: str
    seconds: float


class TrafficServer(Protocol):
    """A server that answers rounds of requests."""

    def answer(self, prompts: Sequence[str], rate: float | None, seed: int) -> list[TimedAnswer]:
        """Answer the prompts: Poisson arrivals at `rate` per second; None: one after another."""

    def learning(self) -> dict[str, Any]:
        """Return the report of its learner, as `GET /learn` has it."""

    def stopped(self) -> AbstractContextManager[None]:
        """Stop its processes within the block."""


@dataclass(frozen=True)
class ShiftSettings:
    """Load, compared rounds and time limit."""

    utilization: float = 0.5  # arrival rate times the latency of a request alone
    round_requests: int = 20
    rounds: int = 5  # number of compared rounds
    seconds: float = 3600.0  # maximum time after the shift, without the rounds of the static server

    def __post_init__(self) -> None:
        if not 0 < self.utilization < 1:
            raise RequestError(f"--utilization must be above 0 and below 1, not {self.utilization}")
        check_least(2, round_requests=self.round_requests)
        check_least(0, rounds=self.rounds)


@dataclass
class ShiftReport:
    """What was measured after the shift; seconds count from the first request after it."""

    rate: float  # requests per second
    requests: int = 0
    seconds: float = 0.0
    trained_seconds: float | None = None  # until the first version was trained; None: none was
    on_seconds: float | None = None  # until a version was in use for all requests; None: none was
    version: int | None = None  # the version in use; None: the initial head
    state: str = ""  # of the learner at the end
    reason: str = ""  # why the last training failed or its version was not kept
    stage: str = ""  # of the newest version's roll-out, and why; empty: there is no version
    rounds: int = 0  # compared rounds, during which a training ran or was paused
    compared_texts: int = 0
    same_texts: int = 0  # of these, equal on both servers
    # Latencies in compared rounds, in milliseconds
    static: Spread = field(default_factory=lambda: Spread(0))
    learning: Spread = field(default_factory=lambda: Spread(0))
    p95_ratio: float | None = None  # learning / static


def observe_shift(
    static: TrafficServer,
    learning: TrafficServer,
    traffic: ShiftedTraffic,
    settings: ShiftSettings,
    progress: StageProgress,
    clock: Callable[[], float] = perf_counter,
    pause: Callable[[float], None] = sleep,
) -> ShiftReport:
    """Send the traffic until a version is in use, the prompts are used up, or the time is over.

    Both servers get the same requests before the shift, and in the compared rounds. Only rounds with a training are
    compared. If a training runs when the prompts are used up, its end is awaited.
    """
    progress("before the shift", 0, 1)
    report = ShiftReport(_arrival_rate(static, traffic.before, settings.utilization))
    for server in (static, learning):
        server.answer(traffic.before, report.rate, 0)
    run = _ShiftRun(static, learning, settings, clock, report)
    for number, begin in enumerate(range(0, len(traffic.after), settings.round_requests)):
        state = learning.learning()["state"]
        progress(state, begin, len(traffic.after))
        run.send(traffic.after[begin : begin + settings.round_requests], number, state)
        if run.is_over():
            break
    while report.state in TRAINS and not run.is_over():
        run.wait(pause)
    run.latencies.fill(report)
    return report


def _arrival_rate(static: TrafficServer, prompts: Sequence[str], utilization: float) -> float:
    """Return the requests per second with which the server is busy for this fraction of the time."""
    static.answer(prompts[:1], None, 0)
    one_by_one = static.answer(prompts[1 : 1 + WARM_UP], None, 1)
    if not one_by_one:
        raise RequestError("the load is measured with the requests before the shift; give --before 2 or more")
    return utilization / fmean(answer.seconds for answer in one_by_one)


class _ShiftRun:
    """Sends rounds of requests, and fills in the report."""

    def __init__(
        self,
        static: TrafficServer,
        learning: TrafficServer,
        settings: ShiftSettings,
        clock: Callable[[], float],
        report: ShiftReport,
    ) -> None:
        self._static, self._learning = static, learning
        self._settings, self._clock, self._report = settings, clock, report
        self._first_version = learning.learning()["version"]  # the version in use before the shift
        self.latencies = _Latencies()

    def send(self, prompts: Sequence[str], number: int, state: str) -> None:
        """Send a round of requests to the server that learns; while it trains, to the other one, too."""
        report = self._report
        report.requests += len(prompts)
        if state not in TRAINS or report.rounds >= self._settings.rounds:
            self._to_learning(prompts, number)
            return
        if report.rounds % 2:  # the order changes, so that a drift favours neither
            static = self._to_static(prompts, number)
            learning = self._to_learning(prompts, number)
        else:
            learning = self._to_learning(prompts, number)
            static = self._to_static(prompts, number)
        self.latencies.add(learning, static)
        report.rounds += 1

    def _to_static(self, prompts: Sequence[str], number: int) -> list[TimedAnswer]:
        with self._learning.stopped():  # its training would take time from this server
            return self._static.answer(prompts, self._report.rate, number)

    def _to_learning(self, prompts: Sequence[str], number: int) -> list[TimedAnswer]:
        began = self._clock()
        answers = self._learning.answer(prompts, self._report.rate, number)
        self._report.seconds += self._clock() - began
        return answers

    def wait(self, pause: Callable[[float], None]) -> None:
        """Wait without requests."""
        began = self._clock()
        pause(POLL_SECONDS)
        self._report.seconds += self._clock() - began

    def is_over(self) -> bool:
        """Take over the learner's report; return whether a new version is in use, or the time is over."""
        report, found = self._report, self._learning.learning()
        report.state, report.reason = found["state"], found["reason"]
        if found["versions"]:
            newest = found["versions"][-1]
            report.stage = f"version {newest['number']}: {newest['stage']} ({newest['reason']})"
            if report.trained_seconds is None:
                report.trained_seconds = report.seconds
        if found["version"] not in (None, self._first_version):
            report.version, report.on_seconds = found["version"], report.seconds
            return True
        return report.seconds >= self._settings.seconds


class _Latencies:
    """Answers of both servers to the same requests."""

    def __init__(self) -> None:
        self._pairs: list[tuple[TimedAnswer, TimedAnswer]] = []  # learning, static

    def add(self, learning: Sequence[TimedAnswer], static: Sequence[TimedAnswer]) -> None:
        self._pairs += zip(learning, static, strict=True)

    def fill(self, report: ShiftReport) -> None:
        """Set the latencies and the counts of texts."""
        report.compared_texts = len(self._pairs)
        report.same_texts = sum(one.text == other.text for one, other in self._pairs)
        report.learning = spread([answer.seconds for answer, _ in self._pairs])
        report.static = spread([answer.seconds for _, answer in self._pairs])
        if report.learning.p95_ms is not None and report.static.p95_ms:
            report.p95_ratio = report.learning.p95_ms / report.static.p95_ms


@dataclass(frozen=True)
class HttpServer:
    """A running `foreword serve`."""

    served: ServedModel
    encode: Callable[[str], list[int]]
    tokens: int  # maximum tokens of an answer
    temperature: float

    def answer(self, prompts: Sequence[str], rate: float | None, seed: int) -> list[TimedAnswer]:
        return asyncio.run(self._answer(prompts, rate, seed))

    async def _answer(self, prompts: Sequence[str], rate: float | None, seed: int) -> list[TimedAnswer]:
        if rate is None:
            return [await self._one(prompt, perf_counter(), seed) for prompt in prompts]
        began = perf_counter()
        due = arrival_times(LoadSettings(rate=rate, num_requests=len(prompts), seed=seed))
        requests = (self._one(prompt, began + at, seed) for prompt, at in zip(prompts, due, strict=True))
        return list(await asyncio.gather(*requests))

    async def _one(self, prompt: str, due: float, seed: int) -> TimedAnswer:
        await asyncio.sleep(max(due - perf_counter(), 0.0))
        body = {"max_tokens": self.tokens, "temperature": self.temperature, "seed": seed}
        answer = await self.served.stream(body | {"prompt": self.encode(prompt)})
        return TimedAnswer(answer.text, answer.last - due)

    def learning(self) -> dict[str, Any]:
        return asyncio.run(self._learning())

    async def _learning(self) -> dict[str, Any]:
        async with open_client(self.served.url, None) as client:
            response = await client.get("/learn")
            if response.status_code != 200:
                raise ForewordError(f"the server refused: {await refusal_of(response)}")
            report: dict[str, Any] = response.json()
            return report

    def stopped(self) -> AbstractContextManager[None]:
        return stopped(self.served.process_id)
