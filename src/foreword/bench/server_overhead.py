"""Compares time per token of a server with that of an engine in this process, interleaved in one run."""

import asyncio
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import mean, median
from time import perf_counter, process_time
from typing import Any

from foreword.acceptance.params import SamplingParams
from foreword.bench.skeleton import ratios_by_round, started_command, take_turns
from foreword.engine.engine import Engine
from foreword.engine.messages import NewRequest
from foreword.errors import ForewordError
from foreword.progress import Progress
from foreword.wire.openai_http import EventParser, open_client, refusal_of


@dataclass(frozen=True)
class StreamedAnswer:
    """An answer, and when it arrived, in seconds of `perf_counter`."""

    text: str
    first: float  # arrival of the first text
    last: float  # arrival of the last text


@dataclass(frozen=True)
class ServedModel:
    """A running `foreword serve`."""

    url: str
    process_id: int

    def cpu_seconds(self) -> tuple[float, float]:
        """Return the CPU seconds that the API process and the engine's process have used so far."""
        if not Path("/proc").is_dir():
            raise ForewordError("a server's processor time is read from /proc; run this benchmark on Linux")
        tasks = Path(f"/proc/{self.process_id}/task/{self.process_id}/children").read_text(encoding="ascii")
        return _cpu_seconds(self.process_id), sum(_cpu_seconds(int(child)) for child in tasks.split())

    async def stream(self, body: dict[str, Any]) -> StreamedAnswer:
        """Post to /v1/completions and read the stream to its end."""
        received: list[bytes] = []
        times: list[float] = []
        async with (
            open_client(self.url, None) as client,
            client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response,
        ):
            if response.status_code != 200:
                raise ForewordError(f"the server refused: {await refusal_of(response)}")
            async for data in response.aiter_raw():
                received.append(data)
                if b"data: {" in data:
                    times.append(perf_counter())
        return StreamedAnswer(_text_of(b"".join(received)), times[0], times[-1])


def _cpu_seconds(process_id: int) -> float:
    """Return a process's user and system time in seconds."""
    # The process name is in parentheses and may contain spaces, so fields are counted from the last parenthesis on.
    fields = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    user_ticks, system_ticks = int(fields[11]), int(fields[12])
    return (user_ticks + system_ticks) / os.sysconf("SC_CLK_TCK")


def _text_of(answer: bytes) -> str:
    """Return the text of a streamed answer; raise `ForewordError` if an event describes an error."""
    events = [json.loads(data) for data in EventParser().feed(answer) if data != b"[DONE]"]
    for event in events:
        if "error" in event:
            raise ForewordError(f"the server failed: {event['error']['message']}")
    return "".join(choice["text"] for event in events for choice in event["choices"])


@contextmanager
def served_model(model: str, options: Sequence[str]) -> Iterator[ServedModel]:
    """Run `foreword serve` on a free port within the block."""
    with started_command(["serve", model, "--port", "0", *options]) as (line, process_id):
        url = next((word for word in line.split() if word.startswith("http://")), None)
        if url is None:
            raise ForewordError("`foreword serve` did not start; its message is above")
        yield ServedModel(url, process_id)


@dataclass(frozen=True)
class Work:
    """Concurrent greedy requests, which engine and server both answer."""

    prompts: Sequence[list[int]]  # token ids of each stream's prompt
    tokens: int  # length of each answer


@dataclass(frozen=True)
class OverheadRun:
    """Times of one round of all streams."""

    token_ms: float  # mean time per token after the first
    engine_cpu_ms: float  # CPU time of the engine's process per token
    api_cpu_ms: float  # CPU time of the API process per token


@dataclass(frozen=True)
class OverheadReport:
    """Medians over the repeats."""

    streams: int
    tokens: int
    engine: OverheadRun
    server: OverheadRun
    ratio: float  # median ratio of neighbouring runs
    ratios: list[float]


def measure_server_overhead(
    engine: Engine, server: ServedModel, work: Work, repeats: int, progress: Progress
) -> OverheadReport:
    """Compare engine and server, interleaved; raise `ForewordError` if their texts differ."""
    arms = {
        "engine": lambda number: asyncio.run(_run_engine(engine, work, f"round {number}")),
        "server": lambda _: asyncio.run(_run_server(server, work)),
    }
    engine_samples, server_samples = take_turns(arms, repeats, progress).values()
    engine_runs, engine_texts = zip(*engine_samples, strict=True)
    server_runs, server_texts = zip(*server_samples, strict=True)
    if engine_texts != server_texts:
        raise ForewordError("engine and server did not give the same texts; there is nothing to compare")
    ratios = ratios_by_round([run.token_ms for run in server_runs], [run.token_ms for run in engine_runs])
    medians = _medians(engine_runs), _medians(server_runs)
    return OverheadReport(len(work.prompts), work.tokens, *medians, median(ratios), ratios)


async def _run_engine(engine: Engine, work: Work, name: str) -> tuple[OverheadRun, list[str]]:
    """Return the times and texts of all streams on the engine; `name` is unique per round."""
    params = SamplingParams(temperature=0, max_tokens=work.tokens, ignore_eos=True)

    async def answer(number: int, prompt: list[int]) -> StreamedAnswer:
        request = NewRequest(f"{name}-{number}", tuple(prompt), params)
        texts, times = [], []
        async for delta in engine.submit(request):
            texts.append(delta.text)
            times.append(perf_counter())
        return StreamedAnswer("".join(texts), times[0], times[-1])

    before = process_time()
    answers = await asyncio.gather(*(answer(i, prompt) for i, prompt in enumerate(work.prompts)))
    return _run_of(answers, work, process_time() - before, 0.0), [a.text for a in answers]


async def _run_server(server: ServedModel, work: Work) -> tuple[OverheadRun, list[str]]:
    body = {"max_tokens": work.tokens, "temperature": 0, "ignore_eos": True}
    before = server.cpu_seconds()
    answers = await asyncio.gather(*(server.stream(body | {"prompt": prompt}) for prompt in work.prompts))
    api_cpu, engine_cpu = (now - then for now, then in zip(server.cpu_seconds(), before, strict=True))
    return _run_of(answers, work, engine_cpu, api_cpu), [a.text for a in answers]


def _run_of(answers: Sequence[StreamedAnswer], work: Work, engine_cpu: float, api_cpu: float) -> OverheadRun:
    token_ms = mean(1e3 * (answer.last - answer.first) / (work.tokens - 1) for answer in answers)
    tokens = len(answers) * work.tokens
    return OverheadRun(token_ms, 1e3 * engine_cpu / tokens, 1e3 * api_cpu / tokens)


def _medians(runs: Iterable[OverheadRun]) -> OverheadRun:
    return OverheadRun(*map(median, zip(*map(astuple, runs), strict=True)))
