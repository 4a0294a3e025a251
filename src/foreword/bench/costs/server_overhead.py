"""What the server adds to the engine's own time per token, both measured in turns in one run."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from time import perf_counter, process_time

from foreword.acceptance.params import SamplingParams
from foreword.bench.served_model import ServedModel, StreamedAnswer
from foreword.engine.engine import Engine
from foreword.engine.messages import NewRequest
from foreword.errors import ForewordError
from foreword.progress import StageProgress


@dataclass(frozen=True)
class Work:
    """What both sides answer: the same tokens from the same prompts, all streams at once, greedily."""

    prompts: Sequence[list[int]]  # token ids, one list per stream
    tokens: int  # per stream


@dataclass(frozen=True)
class OverheadRun:
    """All streams answered once."""

    token_ms: float  # first to last token of a stream, per token after the first; mean over streams
    engine_cpu_ms: float  # processor time per token of the process that has the engine
    api_cpu_ms: float  # the same of the API process


@dataclass(frozen=True)
class OverheadReport:
    """Medians over the repeats."""

    streams: int
    tokens: int
    engine: OverheadRun
    server: OverheadRun
    ratio: float  # server over engine time per token: median of the ratios of neighbouring runs
    ratios: list[float]


async def measure_server_overhead(
    engine: Engine, server: ServedModel, work: Work, repeats: int, on_progress: StageProgress
) -> OverheadReport:
    """Engine and server in turns, one of them busy at a time, after one round that does not count."""
    rounds = []
    for number in range(repeats + 1):
        on_progress("measuring", number, repeats + 1)
        alone, alone_texts = await _run_engine(engine, work, f"round-{number}")
        served, served_texts = await _run_server(server, work)
        if alone_texts != served_texts:
            raise ForewordError("engine and server did not give the same texts; there is nothing to compare")
        rounds.append((alone, served))
    counted = rounds[1:]
    ratios = [served.token_ms / alone.token_ms for alone, served in counted]
    return OverheadReport(
        len(work.prompts),
        work.tokens,
        _medians([alone for alone, _ in counted]),
        _medians([served for _, served in counted]),
        median(ratios),
        ratios,
    )


async def _run_engine(engine: Engine, work: Work, name: str) -> tuple[OverheadRun, list[str]]:
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
    api, engine = (now - then for now, then in zip(server.cpu_seconds(), before, strict=True))
    return _run_of(answers, work, engine, api), [a.text for a in answers]


def _run_of(answers: Sequence[StreamedAnswer], work: Work, engine_cpu: float, api_cpu: float) -> OverheadRun:
    token_ms = mean(1e3 * (answer.last - answer.first) / (work.tokens - 1) for answer in answers)
    tokens = len(answers) * work.tokens
    return OverheadRun(token_ms, 1e3 * engine_cpu / tokens, 1e3 * api_cpu / tokens)


def _medians(runs: Sequence[OverheadRun]) -> OverheadRun:
    return OverheadRun(
        median(run.token_ms for run in runs),
        median(run.engine_cpu_ms for run in runs),
        median(run.api_cpu_ms for run in runs),
    )
