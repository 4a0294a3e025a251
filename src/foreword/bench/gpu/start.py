"""How long a user waits: from weights on the device to the first token of an engine with the usual settings."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import TypeVar

import torch

from foreword.acceptance.params import SamplingParams
from foreword.backends.interface import Decoder
from foreword.bench.gpu.engines import random_prompts
from foreword.control.measured import MeasuredPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.lookup.suffix import SuffixConfig, SuffixDrafter
from foreword.engine.config import EngineConfig
from foreword.engine.core import EngineCore
from foreword.engine.drafting.default_speculation import WITHOUT_A_HEAD
from foreword.engine.messages import NewRequest
from foreword.engine.parts import EngineParts
from foreword.engine.pipeline import StepPipeline
from foreword.engine.preparing import prepare_passes
from foreword.engine.profiles import measure_profile
from foreword.engine.text import Vocabulary
from foreword.progress import Progress


@dataclass(frozen=True)
class StartTime:
    """The parts follow each other."""

    seconds: float  # of all
    decoder_seconds: float  # finding out which products the library may compute
    memory_seconds: float  # trying the largest pass, and taking the rest for KV
    prepare_seconds: float  # compiling and capturing
    prepared: int  # sizes of passes
    wanted: int  # sizes that there was something to prepare for
    profile_seconds: float  # finding out what passes cost
    first_token_seconds: float  # of the first request
    second_token_seconds: float  # until the next token


Made = TypeVar("Made", bound=Decoder)


def measure_start(
    make: Callable[[], Made],
    context: int,
    progress: Progress,
    config: EngineConfig | None = None,
    clock: Callable[[], float] = perf_counter,
) -> tuple[Made, StartTime]:
    """`make` makes the decoder of weights that are there; the engine's memory is given back."""
    config = config or EngineConfig()
    marks = [clock()]
    decoder = make()
    marks.append(clock())
    core = _engine(decoder, config)
    marks.append(clock())
    prepared = prepare_passes(core, config.max_num_seqs, progress, clock)
    marks.append(clock())
    core.situation.costs.begin_with(0, measure_profile(core, clock))
    marks.append(clock())
    marks += _tokens(core, context, clock)
    core.close()
    del core
    gc.collect()
    if decoder.device.type == "cuda":
        torch.cuda.empty_cache()
    parts = [end - begin for begin, end in pairwise(marks)]
    made, memory, preparing, profile, first, second = parts
    whole = marks[5] - marks[0]
    figures = (whole, made, memory, preparing, prepared.sizes, prepared.wanted, profile, first, second)
    return decoder, StartTime(*figures)


def _engine(decoder: Decoder, config: EngineConfig) -> EngineCore:
    """As a server makes it for a model without a head."""
    speculation = SpeculationConfig.parse(WITHOUT_A_HEAD)
    parts = EngineParts(config, MeasuredPolicy(), lambda _: SuffixDrafter(SuffixConfig()), speculation)
    return EngineCore(decoder, Vocabulary(decoder.config.vocab_size), parts)


def _tokens(core: EngineCore, context: int, clock: Callable[[], float]) -> tuple[float, float]:
    """When the first two tokens of a request are there."""
    (prompt,) = random_prompts(core.target, context, 1)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    (request,) = core.add(NewRequest("start", tuple(prompt), params))
    pipeline, marks = StepPipeline(core), [0.0, 0.0]
    while core.has_requests or pipeline.is_busy:
        before = len(request.output_ids)
        pipeline.advance()
        for place in range(before, len(request.output_ids)):
            marks[place] = clock()
    return marks[0], marks[1]
