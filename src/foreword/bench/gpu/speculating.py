"""Measures speculative decoding on models with random weights, at given numbers of tokens per pass.

Random weights cost as much as trained ones, but nothing would be accepted. So a drafter of the usual shape drafts, and
its tokens are replaced by the target's recorded answers, with errors that give the wanted number of tokens per pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Annotated

from foreword.backends.interface import Decoder
from foreword.bench.batch_runs import medians, run_batch, speedup
from foreword.bench.gpu.engines import DECODED, controlled_engine, random_prompts, timed_engine
from foreword.bench.gpu.recorded import DEPTH, Answers, RecordedDrafter, recorded
from foreword.bench.random_heads import METHODS, head_drafter, random_head
from foreword.bench.skeleton import InTable, staged, take_turns
from foreword.control.fixed import FixedPolicy
from foreword.drafters.config import SpeculationSetting
from foreword.drafters.model.autoregressive import AutoregressiveDrafter, DraftingSize
from foreword.engine.core import EngineCore
from foreword.progress import StageProgress

WARM_UP, RUNS = 2, 3  # warm-up rounds, which capture graphs, and measured rounds, whose median counts


@dataclass(frozen=True)
class SpeculativeSpeed:
    """One drafter at one batch size."""

    drafter: Annotated[str, InTable("drafts")]
    batch: Annotated[int, InTable("batch")]
    tokens_per_pass: Annotated[float, InTable("tokens per pass", ".2f")]  # per request
    tokens_per_second: Annotated[float, InTable("tokens/s", ".0f")]
    step_ms: Annotated[float, InTable("step, ms", ".3f")]
    draft_ms: Annotated[float, InTable("drafting, ms", ".3f")]  # per step


def measure_speculation(
    decoder: Decoder, draft_decoder: Decoder, *, batches: Sequence[int], context: int, progress: StageProgress
) -> list[SpeculativeSpeed]:
    """Measure drafts that cost nothing, like a lookup's, at 3.0 tokens per pass; a head and a draft model at 3.9."""
    head = head_drafter(decoder, random_head(decoder, "eagle3"))
    texts = max(batches, default=1) * (context + 6 * DECODED)
    draft_model = AutoregressiveDrafter(
        draft_decoder, decoder.config.vocab_size, DraftingSize(kv_tokens=texts, rows_per_pass=2048)
    )
    drafters = [("free", 3.0, None), ("eagle3", 3.9, head), ("draft model", 3.9, draft_model)]
    answers = _recorded_answers(decoder, batches, context)
    cases = [(size, *drafter) for size in batches for drafter in drafters]
    return [
        _speculative_speed(decoder, name, RecordedDrafter(answers[size], wanted, drafter))
        for size, name, wanted, drafter in staged(cases, progress, lambda one: f"{one[1]}, batch {one[0]}")
    ]


def measure_heads(
    decoder: Decoder,
    *,
    batches: Sequence[int],
    context: int,
    progress: StageProgress,
    methods: Sequence[str] = METHODS,
) -> list[SpeculativeSpeed]:
    """Measure every kind of head at 3.9 tokens per pass, with its own runner and in plain torch."""
    speeds: list[SpeculativeSpeed] = []
    answers = _recorded_answers(decoder, batches, context)
    stages = 2 * len(methods) * len(batches)
    for method in methods:
        head = random_head(decoder, method)
        for name, is_reference in ((method, False), (f"{method} in torch", True)):
            drafter = head_drafter(decoder, head, is_reference)
            for size in batches:
                progress(f"{name}, batch {size}", len(speeds), stages)
                recorded_drafter = RecordedDrafter(answers[size], 3.9, drafter)
                speeds.append(_speculative_speed(decoder, name, recorded_drafter))
    return speeds


def _recorded_answers(decoder: Decoder, batches: Sequence[int], context: int) -> dict[int, Answers]:
    return {size: recorded(decoder, random_prompts(decoder, context, size)) for size in batches}


def _speculative_speed(decoder: Decoder, name: str, drafter: RecordedDrafter) -> SpeculativeSpeed:
    """Return the round with the median throughput, of decoding the drafter's prompts."""
    prompts = list(drafter.answers)
    engine = timed_engine(decoder, len(prompts[0]), len(prompts), FixedPolicy(drafter, DEPTH))
    runs = [run_batch(engine, prompts, DECODED, False) for _ in range(WARM_UP + RUNS)][WARM_UP:]
    run = sorted(runs, key=lambda run: run.tokens_per_second)[RUNS // 2]
    return SpeculativeSpeed(
        name, run.batch, run.tokens_per_pass, run.tokens_per_second, run.step_ms, run.draft_ms
    )


HEAD_TOKENS_PER_PASS = (3.9, 1.2)
"""Tokens per pass of the two simulated heads, if all their draft tokens are verified."""

CONTROL_ARMS: Mapping[str, SpeculationSetting] = {"plain": False, "controller": None}

ROUNDS = 6  # measured windows per arm
WARM_UP_WINDOWS = 4  # windows in which graphs are captured and the controller learns


@dataclass(frozen=True)
class ControlledSpeed:
    """The controller at one batch size."""

    batch: Annotated[int, InTable("batch")]
    offered: Annotated[float, InTable("head, tokens per pass", ".1f")]  # if all draft tokens are verified
    plain_tokens_per_second: Annotated[float, InTable("plain, tokens/s", ".0f")]
    tokens_per_second: Annotated[float, InTable("controller", ".0f")]
    ratio: Annotated[float, InTable("relative to plain", ".3f")]  # median over the rounds
    lowest: Annotated[float, InTable("lowest", ".3f")]  # lowest ratio of a round
    tokens_per_pass: Annotated[float, InTable("tokens per pass", ".2f")]  # per request


def measure_controller(
    decoder: Decoder, *, batches: Sequence[int], context: int, progress: StageProgress, rounds: int = ROUNDS
) -> list[ControlledSpeed]:
    """Compare controller and plain decoding at every batch size, with a head of high and one of low acceptance."""
    head = head_drafter(decoder, random_head(decoder, "eagle3"))
    answers = _recorded_answers(decoder, batches, context)
    cases = [(batch, offered) for batch in batches for offered in HEAD_TOKENS_PER_PASS]
    speeds: list[ControlledSpeed] = []
    for batch, offered in staged(cases, progress, lambda case: f"batch {case[0]}, {case[1]} offered"):
        drafter = RecordedDrafter(answers[batch], offered, head)
        engine = controlled_engine(decoder, context, batch, drafter, DEPTH)
        speeds.append(_compared(engine, list(drafter.answers), offered, rounds))
    return speeds


def _compared(
    engine: EngineCore, prompts: Sequence[Sequence[int]], offered: float, rounds: int
) -> ControlledSpeed:
    arms = {name: partial(run_batch, engine, prompts, DECODED, one) for name, one in CONTROL_ARMS.items()}
    plain, controlled = take_turns(arms, rounds, warm_up=WARM_UP_WINDOWS, alternate=True).values()
    ratios = speedup(controlled, plain)
    (plain_rate,) = medians(plain, "tokens_per_second")
    rate, per_pass = medians(controlled, "tokens_per_second", "tokens_per_pass")
    return ControlledSpeed(plain[0].batch, offered, plain_rate, rate, median(ratios), min(ratios), per_pass)
