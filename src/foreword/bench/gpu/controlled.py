"""The controller on a device, beside plain decoding: with a head that is often right, and with one that seldom is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from foreword.backends.interface import Decoder
from foreword.bench.costs.batch import BatchRun, run_batch
from foreword.bench.gpu.engines import DECODED, controlled_engine, random_prompts
from foreword.bench.gpu.random_drafters import head_drafter, random_head
from foreword.bench.gpu.speculating import DEPTH, RecordedDrafter, rate_for, recorded
from foreword.engine.core import EngineCore

QUALITIES = (3.9, 1.2)
"""Tokens that a pass with all guesses would make."""

ROUNDS = 6
"""Windows of each way that count."""

WARM_UP = 4
"""Windows before them: what is captured is captured there, and what guessing brings is found out."""


@dataclass(frozen=True)
class ControlledSpeed:
    """The controller at one batch size."""

    batch: int
    offered: float  # tokens that a pass with all guesses would make
    plain_tokens_per_second: float
    tokens_per_second: float
    ratio: float  # of neighbouring windows
    lowest: float  # of these
    tokens_per_pass: float  # of one request


def measure_controller(
    decoder: Decoder,
    *,
    batches: Sequence[int],
    context: int,
    progress: Callable[[str, int, int], None],
    rounds: int = ROUNDS,
) -> list[ControlledSpeed]:
    """Every batch with either head; windows of both ways take turns on one engine."""
    with TemporaryDirectory() as folder:
        head = head_drafter(decoder, random_head(decoder, "eagle3", Path(folder) / "eagle3"))
    found: list[ControlledSpeed] = []
    for batch in batches:
        prompts = random_prompts(decoder, context, batch)
        truth = recorded(decoder, prompts)
        for quality in QUALITIES:
            progress(f"batch {batch}, {quality} offered", len(found), len(batches) * len(QUALITIES))
            drafter = RecordedDrafter(truth, rate_for(quality, DEPTH), head)
            engine = controlled_engine(decoder, context, batch, drafter, DEPTH)
            found.append(_compared(engine, prompts, quality, rounds))
    return found


def _compared(
    engine: EngineCore, prompts: Sequence[Sequence[int]], offered: float, rounds: int
) -> ControlledSpeed:
    plain: list[BatchRun] = []
    controlled: list[BatchRun] = []
    for number in range(-WARM_UP, rounds):
        ways = [(plain, False), (controlled, None)]
        for runs, setting in ways if number % 2 else reversed(ways):
            run = run_batch(engine, prompts, DECODED, speculate=setting)
            if number >= 0:
                runs.append(run)
    ratios = [b.tokens_per_second / a.tokens_per_second for a, b in zip(plain, controlled, strict=True)]
    return ControlledSpeed(
        plain[0].batch,
        offered,
        median(run.tokens_per_second for run in plain),
        median(run.tokens_per_second for run in controlled),
        median(ratios),
        min(ratios),
        median(run.tokens / (run.steps * run.batch) for run in controlled),
    )
