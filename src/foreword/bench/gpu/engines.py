"""Measures an engine on a GPU: its start, and plain decoding by batch size."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Annotated, TypeVar

import torch

from foreword.backends.interface import Decoder
from foreword.bench.batch_runs import greedy_requests, run_batch
from foreword.bench.gpu.device import (
    PassTime,
    copy_bandwidth,
    experts_read,
    matrix_operations,
    matrix_rate,
    pass_times,
    prompt_seconds,
    read_bandwidth,
    step_bytes,
)
from foreword.bench.skeleton import InTable
from foreword.bench.step_cost import random_tokens
from foreword.control.fixed import FixedPolicy
from foreword.control.policy import MeasuredPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.lookup.suffix import SuffixConfig, SuffixDrafter
from foreword.engine.config import EngineConfig, EngineParts, sequence_bytes
from foreword.engine.core import EngineCore
from foreword.engine.drafting.default_speculation import WITHOUT_A_HEAD
from foreword.engine.preparing import prepare_passes
from foreword.engine.profiles import measure_profile
from foreword.engine.step_pipeline import StepPipeline
from foreword.engine.text import Vocabulary
from foreword.progress import Progress, StageProgress
from foreword.speculation.drafting import Drafter

DECODED = 64  # tokens per request while an engine is timed


def timed_engine(decoder: Decoder, context: int, batch: int, policy: FixedPolicy | None = None) -> EngineCore:
    """Return an engine with memory for `batch` texts of `context` tokens, and for a few measurements after them."""
    return _engine(decoder, EngineParts(_config(decoder, context, batch), policy or FixedPolicy()))


def controlled_engine(decoder: Decoder, context: int, batch: int, drafter: Drafter, depth: int) -> EngineCore:
    """Return an engine whose controller decides when and how deep `drafter` drafts."""
    # The method is a placeholder, since the engine gets `drafter` for it.
    speculation = SpeculationConfig.parse({"method": "ngram", "num_speculative_tokens": depth})
    config = _config(decoder, context, batch)
    engine = _engine(decoder, EngineParts(config, MeasuredPolicy(), lambda _: drafter, speculation))
    engine.situation.costs.begin_with(0, measure_profile(engine))
    return engine


def _config(decoder: Decoder, context: int, batch: int) -> EngineConfig:
    """Return a config with enough KV memory for `batch` requests of `context` tokens that decode several times."""
    length = context + 5 * DECODED  # a warm-up and up to four timed runs
    row_bytes = 2 * decoder.kv_rows().bytes_per_row  # twice, because a head has KV rows too
    states = decoder.state_spec()
    # Twice the states of all requests, because the engine uses half of the memory for states.
    state_bytes = 0 if states is None else 2 * (batch + 1) * sequence_bytes(states)
    return EngineConfig(
        kv_cache_memory_bytes=batch * (length + 128) * row_bytes + state_bytes,
        max_model_len=length,
        max_num_seqs=batch,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        max_draft_share=1e9,  # no limit
    )


def _engine(decoder: Decoder, parts: EngineParts) -> EngineCore:
    """Return an engine without a tokenizer, which waits for its kernels to be compiled."""
    core = EngineCore(decoder, Vocabulary(decoder.config.vocab_size), parts)
    if core.kernels is not None:
        core.kernels.are_awaited = True
    return core


def random_prompts(decoder: Decoder, context: int, batch: int) -> list[list[int]]:
    """Return a different text for every request, so that a mixture routes them to different experts."""
    tokens = random_tokens(batch * context, decoder.config.vocab_size)
    return [tokens[begin : begin + context] for begin in range(0, len(tokens), context)]


PROMPT = 4096  # length of the timed prompt


@dataclass(frozen=True)
class BatchSpeed:
    """Plain decoding at one batch size, through the engine."""

    batch: int
    tokens_per_second: float
    step_ms: float
    host_ms: float  # host time per step, without pass and acceptance
    experts: float | None = None  # mean distinct experts that a step reads per layer; None: no mixture
    floor_ms: float | None = None  # time to read a step's active weights once, at the device's peak rate


@dataclass(frozen=True)
class GpuReport:
    """Peak rates of the device, and times of the decoder."""

    device: str
    copy_terabytes: float  # per second, read and written
    read_terabytes: float  # per second
    matrix_teraflops: float
    floor_ms: float  # time to read all weights once
    rows: list[PassTime]  # passes of one request
    batches: list[BatchSpeed]
    prompt_ms: float  # of PROMPT tokens
    prompt_rate: float  # fraction of the matrix rate


def measure_gpu(
    decoder: Decoder, *, batches: Sequence[int], rows: Sequence[int], context: int, progress: StageProgress
) -> GpuReport:
    """Measure the device's peak rates, passes by number of rows, decoding by batch size, and a long prompt."""
    stages = count()

    def begin(stage: str) -> None:
        progress(stage, next(stages), len(rows) + len(batches) + 2)

    begin("ceilings")
    device = decoder.device
    copy_rate, read_rate, flops = copy_bandwidth(device), read_bandwidth(device), matrix_rate(device)
    times, passes = pass_times(decoder, context, rows), []
    for size in rows:
        begin(f"{size} rows")
        passes.append(next(times))
    engine = timed_engine(decoder, context, max(batches))
    speeds = []
    for size in batches:
        begin(f"batch {size}")
        speeds.append(_batch_speed(engine, size, context, read_rate))
    begin("prompt")
    prompt = prompt_seconds(decoder, PROMPT)
    return GpuReport(
        device=torch.cuda.get_device_name(device),
        copy_terabytes=copy_rate / 1e12,
        read_terabytes=read_rate / 1e12,
        matrix_teraflops=flops / 1e12,
        floor_ms=decoder.weight_bytes / read_rate * 1e3,
        rows=passes,
        batches=speeds,
        prompt_ms=prompt * 1e3,
        prompt_rate=matrix_operations(decoder, PROMPT) / prompt / flops,
    )


def _batch_speed(engine: EngineCore, size: int, context: int, read_rate: float) -> BatchSpeed:
    """Measure plain decoding at one batch size; `read_rate` is the device's, in bytes per second."""
    prompts = random_prompts(engine.target, context, size)
    run_batch(engine, prompts, 8, speculate=False)  # captures graphs
    run = run_batch(engine, prompts, DECODED, speculate=False)
    experts = experts_read(engine.target, prompts)
    floor = step_bytes(engine.target, experts) / read_rate
    return BatchSpeed(size, run.tokens_per_second, run.step_ms, run.host_ms, experts, floor * 1e3)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


@dataclass(frozen=True)
class StartTime:
    """Seconds of the phases of an engine's start."""

    seconds: float  # total, until the first token
    # Choosing which products cuBLAS computes.
    decoder_seconds: Annotated[float, InTable("products", "{:.2f} s".format)]
    # Trying the largest pass, allocating KV.
    memory_seconds: Annotated[float, InTable("KV memory", "{:.2f} s".format)]
    prepare_seconds: Annotated[float, InTable("captures", "{:.2f} s".format)]  # compiling and capturing
    prepared: int  # pass sizes
    wanted: int  # pass sizes to prepare
    profile_seconds: Annotated[float, InTable("cost profile", "{:.2f} s".format)]  # measuring pass costs
    first_token_seconds: Annotated[float, InTable("first token", _milliseconds)]  # of the first request
    second_token_seconds: Annotated[float, InTable("second token", _milliseconds)]  # from the first token on


Made = TypeVar("Made", bound=Decoder)


def measure_start(
    make: Callable[[], Made],
    context: int,
    progress: Progress,
    config: EngineConfig | None = None,
    clock: Callable[[], float] = perf_counter,
) -> tuple[Made, StartTime]:
    """Return a decoder, and the times of an engine's start with it; `make` creates the decoder from loaded weights.

    The engine's memory is free afterwards.
    """
    config = config or EngineConfig()
    began = clock()
    decoder = make()
    decoder_at = clock()
    core = _default_engine(decoder, config)
    memory_at = clock()
    prepared = prepare_passes(core, config.max_num_seqs, progress, clock)
    prepared_at = clock()
    core.situation.costs.begin_with(0, measure_profile(core, clock))
    profile_at = clock()
    first_at, second_at = _token_times(core, context, clock)
    core.close()
    del core
    gc.collect()
    if decoder.device.type == "cuda":
        torch.cuda.empty_cache()
    return decoder, StartTime(
        seconds=first_at - began,
        decoder_seconds=decoder_at - began,
        memory_seconds=memory_at - decoder_at,
        prepare_seconds=prepared_at - memory_at,
        prepared=prepared.cases,
        wanted=prepared.wanted_cases,
        profile_seconds=profile_at - prepared_at,
        first_token_seconds=first_at - profile_at,
        second_token_seconds=second_at - first_at,
    )


def _default_engine(decoder: Decoder, config: EngineConfig) -> EngineCore:
    """Return an engine as a server creates it for a model without a head."""
    speculation = SpeculationConfig.parse(WITHOUT_A_HEAD)
    parts = EngineParts(config, MeasuredPolicy(), lambda _: SuffixDrafter(SuffixConfig()), speculation)
    return EngineCore(decoder, Vocabulary(decoder.config.vocab_size), parts)


def _token_times(core: EngineCore, context: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Return when the first and the second token of a request are committed."""
    (prompt,) = random_prompts(core.target, context, 1)
    (request,) = core.add(*greedy_requests("start", [prompt], 2))
    pipeline, times = StepPipeline(core), list[float]()
    while core.has_requests or pipeline.is_busy:
        pipeline.advance()
        while len(times) < len(request.output_ids):
            times.append(clock())
    return times[0], times[1]
