"""Measures throughput and host time by batch size, plain and speculative."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import Annotated

from foreword.bench.batch_runs import BatchRun, medians, run_batch, speedup
from foreword.bench.skeleton import PLAIN, InTable, stage_of, take_turns
from foreword.engine.core import EngineCore
from foreword.errors import RequestError
from foreword.progress import StageProgress

SPECULATIVE = "speculative"
_FIGURES = ("tokens_per_second", "token_ms", "host_ms")


@dataclass(frozen=True)
class BatchRow:
    """Plain and speculative decoding at one batch size; medians of interleaved runs."""

    batch: Annotated[int, InTable("batch")]
    plain_tokens_per_second: Annotated[float, InTable("plain\ntok/s", ".1f")]
    plain_token_ms: Annotated[float, InTable("\nms/tok", ".1f")]
    plain_host_ms: Annotated[float, InTable("\nhost", ".2f")]
    speculative_tokens_per_second: Annotated[float, InTable("spec\ntok/s", ".1f")]
    speculative_token_ms: Annotated[float, InTable("\nms/tok ", ".1f")]
    speculative_host_ms: Annotated[float, InTable("\nhost ", ".2f")]
    speedup: Annotated[float, InTable("\nx plain", ".2f")]  # median ratio of runs of the same round
    scaling: Annotated[float, InTable("plain\nx first", ".2f")]  # throughput relative to the first batch size
    acceptance: Annotated[float, InTable("alpha", ".2f")]  # committed draft tokens / verified ones
    tokens_per_pass: Annotated[float, InTable("tau", ".2f")]  # per request


def measure_batches(
    engine: EngineCore,
    prompts: Sequence[Sequence[int]],
    batches: Sequence[int],
    tokens: int,
    repeats: int,
    on_progress: StageProgress,
) -> list[BatchRow]:
    """Measure every batch size `repeats` times plain and speculative, interleaved, `tokens` per request on average."""
    if engine.drafters.default is None:
        raise RequestError("a speculative configuration is needed to compare with")
    if repeats < 1 or tokens < 2 or not batches or min(batches) < 1:
        raise RequestError("--repeats and every batch must be at least 1, --tokens at least 2")
    rows: list[BatchRow] = []
    for index, batch in enumerate(batches):
        chosen = list(islice(cycle(prompts), batch))
        arms = {
            PLAIN: partial(run_batch, engine, chosen, tokens, False),
            SPECULATIVE: partial(run_batch, engine, chosen, tokens, True),
        }
        progress = stage_of(on_progress, f"batch {batch}", index, len(batches))
        runs = take_turns(arms, repeats, progress, warm_up=0)
        rows.append(_row(runs[PLAIN], runs[SPECULATIVE], rows[0] if rows else None))
    return rows


def _row(plain: Sequence[BatchRun], speculative: Sequence[BatchRun], first: BatchRow | None) -> BatchRow:
    """Return the results at one batch size; `first` is the row of the first batch size, if this is another."""
    drafted = sum(run.drafted for run in speculative)
    plain_rate, plain_token_ms, plain_host_ms = medians(plain, *_FIGURES)
    rate, token_ms, host_ms = medians(speculative, *_FIGURES)
    return BatchRow(
        batch=plain[0].batch,
        plain_tokens_per_second=plain_rate,
        plain_token_ms=plain_token_ms,
        plain_host_ms=plain_host_ms,
        speculative_tokens_per_second=rate,
        speculative_token_ms=token_ms,
        speculative_host_ms=host_ms,
        speedup=median(speedup(speculative, plain)),
        scaling=1.0 if first is None else plain_rate / first.plain_tokens_per_second,
        acceptance=sum(run.accepted for run in speculative) / max(drafted, 1),
        tokens_per_pass=median(run.tokens_per_pass for run in speculative),
    )
