"""Everything that `foreword bench gpu` measures, in one run on one device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from foreword.backends.interface import Decoder
from foreword.bench.costs.batch import run_batch
from foreword.bench.gpu.ceilings import copy_bandwidth, matrix_rate, read_bandwidth
from foreword.bench.gpu.engines import DECODED, random_prompts, timed_engine
from foreword.bench.gpu.passes import PassTime, PassTimer, matrix_operations, prompt_seconds
from foreword.engine.core import EngineCore

PROMPT = 4096
"""Tokens of the timed prompt."""


@dataclass(frozen=True)
class BatchSpeed:
    """Plain decoding at one batch size, through the engine."""

    batch: int
    tokens_per_second: float
    step_ms: float
    host_ms: float  # of a step, beside the pass and acceptance


@dataclass(frozen=True)
class GpuReport:
    """What the device can do, and what the decoder gets of it."""

    device: str
    copy_terabytes: float  # a second, read and written
    read_terabytes: float  # a second
    matrix_teraflops: float
    floor_ms: float  # of reading all weights once
    rows: list[PassTime]  # passes of one request
    batches: list[BatchSpeed]
    prompt_ms: float  # of PROMPT tokens
    prompt_rate: float  # of the matrix rate


def measure_gpu(
    decoder: Decoder,
    *,
    batches: Sequence[int],
    rows: Sequence[int],
    context: int,
    progress: Callable[[str, int, int], None],
) -> GpuReport:
    """All figures; `progress` is told what is measured and how far it is."""
    stages = [
        "ceilings",
        *(f"{count} rows" for count in rows),
        *(f"batch {size}" for size in batches),
        "prompt",
    ]
    done = iter(range(len(stages)))

    def begin() -> None:
        place = next(done)
        progress(stages[place], place, len(stages))

    begin()
    device = decoder.device
    ceilings = copy_bandwidth(device), read_bandwidth(device), matrix_rate(device)
    timer = PassTimer(decoder, context, 1, max(rows))
    passes = []
    for count in rows:
        begin()
        passes.append(timer.time(1, count))
    engine = timed_engine(decoder, context, max(batches))
    speeds = []
    for size in batches:
        begin()
        speeds.append(_speed(engine, size, context))
    begin()
    prompt = prompt_seconds(decoder, PROMPT)
    read = decoder.weight_bytes / ceilings[1]
    return GpuReport(
        device=torch.cuda.get_device_name(device),
        copy_terabytes=ceilings[0] / 1e12,
        read_terabytes=ceilings[1] / 1e12,
        matrix_teraflops=ceilings[2] / 1e12,
        floor_ms=read * 1e3,
        rows=passes,
        batches=speeds,
        prompt_ms=prompt * 1e3,
        prompt_rate=matrix_operations(decoder, PROMPT) / prompt / ceilings[2],
    )


def _speed(engine: EngineCore, size: int, context: int) -> BatchSpeed:
    prompts = random_prompts(engine.target, context, size)
    run_batch(engine, prompts, 8, speculate=False)  # captures what is captured
    run = run_batch(engine, prompts, DECODED, speculate=False)
    return BatchSpeed(
        size, run.tokens / run.seconds, 1e3 * run.seconds / run.steps, 1e3 * run.host_seconds / run.steps
    )
