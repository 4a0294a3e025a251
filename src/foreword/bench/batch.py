"""Measures throughput and host time by batch size, plain and speculative."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median
from time import perf_counter

from foreword.acceptance.params import SamplingParams
from foreword.bench.skeleton import PLAIN, neighbours, stage_of, take_turns
from foreword.drafters.config import SpeculationSetting
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest
from foreword.engine.pipeline import StepPipeline
from foreword.engine.requests.request import Request
from foreword.errors import RequestError
from foreword.progress import StageProgress

SPECULATIVE = "speculative"


@dataclass(frozen=True)
class BatchRun:
    """One run of decoding with a full batch, after prefill."""

    batch: int
    tokens: int  # committed
    steps: int
    seconds: float
    host_seconds: float  # time outside drafting, forward pass and acceptance
    draft_seconds: float
    drafted: int
    accepted: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def token_ms(self) -> float:
        """Mean time between tokens of one request."""
        return 1e3 * self.seconds * self.batch / self.tokens

    @property
    def host_ms(self) -> float:
        return 1e3 * self.host_seconds / self.steps

    @property
    def step_ms(self) -> float:
        return 1e3 * self.seconds / self.steps

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens per request and pass."""
        return self.tokens / (self.steps * self.batch)


def medians(runs: Sequence[BatchRun], *figures: str) -> list[float]:
    """Return the median of each of these attributes over all runs."""
    return [median(getattr(run, figure) for run in runs) for figure in figures]


def speedup(runs: Sequence[BatchRun], plain: Sequence[BatchRun]) -> list[float]:
    """Return the throughput relative to plain decoding of the same round."""
    return neighbours([run.tokens_per_second for run in runs], [run.tokens_per_second for run in plain])


@dataclass(frozen=True)
class BatchRow:
    """Plain and speculative decoding at one batch size; medians of interleaved runs."""

    batch: int
    plain_tokens_per_second: float
    plain_token_ms: float
    plain_host_ms: float
    speculative_tokens_per_second: float
    speculative_token_ms: float
    speculative_host_ms: float
    speedup: float  # median ratio of runs of the same round
    scaling: float  # plain throughput relative to the first batch size
    acceptance: float  # committed draft tokens / verified ones
    tokens_per_pass: float  # per request


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
    for place, batch in enumerate(batches):
        chosen = list(islice(cycle(prompts), batch))
        arms = {name: batch_arm(engine, chosen, tokens, name == SPECULATIVE) for name in (PLAIN, SPECULATIVE)}
        progress = stage_of(on_progress, f"batch {batch}", place, len(batches))
        runs = take_turns(arms, repeats, progress, warm_up=0)
        rows.append(_row(runs[PLAIN], runs[SPECULATIVE], rows[0] if rows else None))
    return rows


@contextmanager
def full_batch(
    engine: EngineCore, wanted: Sequence[NewRequest], advance: Callable[[], object]
) -> Iterator[list[Request]]:
    """Yield these requests when all have finished prefill; abort them at the end of the block."""
    requests = [engine.add(one)[0] for one in wanted]
    try:
        while not all(request.output_ids for request in requests):
            advance()
        yield requests
    finally:
        for request in requests:
            engine.abort(request.name)


def run_batch(
    engine: EngineCore,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    speculate: SpeculationSetting,
    warm: int = 0,
) -> BatchRun:
    """Run prefill, then decode until the requests have gained `tokens` tokens on average.

    With `speculate` True, the engine's own drafter drafts at every step. The first `warm` tokens do not count, because
    remote drafters must process the prompts first.
    """
    params = SamplingParams(temperature=0, max_tokens=_room(engine, prompts, tokens + warm), ignore_eos=True)
    setting = {"fixed": True} if speculate is True else speculate
    wanted = [
        NewRequest(f"batch-{index}", tuple(prompt), params, speculation=setting)
        for index, prompt in enumerate(prompts)
    ]
    pipeline = StepPipeline(engine)
    try:
        with full_batch(engine, wanted, pipeline.advance) as requests:
            if warm:
                _decode(engine, pipeline, requests, warm * len(requests))
            return _decode(engine, pipeline, requests, tokens * len(requests))
    finally:
        while pipeline.is_busy:
            pipeline.advance()


def batch_arm(
    engine: EngineCore,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    speculate: SpeculationSetting,
    warm: int = 0,
) -> Callable[[int], BatchRun]:
    """Return an arm of `take_turns` that runs this batch."""
    return lambda _: run_batch(engine, prompts, tokens, speculate, warm)


def _room(engine: EngineCore, prompts: Sequence[Sequence[int]], tokens: int) -> int:
    """Return a token limit that no request reaches while the others gain theirs."""
    longest = max(len(prompt) for prompt in prompts)
    room = engine.max_model_len - longest
    if room < 4 * tokens:
        raise RequestError(
            f"a prompt of {longest} tokens leaves no room for {4 * tokens} more; lower --tokens"
        )
    return room


def _decode(engine: EngineCore, pipeline: StepPipeline, requests: Sequence[Request], wanted: int) -> BatchRun:
    had = sum(len(request.tokens) for request in requests)
    drafted, accepted = _drafted(requests)
    before, steps = engine.seconds, engine.steps
    began, gained = perf_counter(), 0
    while gained < wanted:
        pipeline.advance()
        gained = sum(len(request.tokens) for request in requests) - had
    seconds, spent = perf_counter() - began, engine.seconds - before
    if any(request.finish_reason is not None for request in requests):
        raise RequestError("a request ended before the measurement; lower --tokens or enlarge the KV cache")
    all_drafted, all_accepted = _drafted(requests)
    return BatchRun(
        batch=len(requests),
        tokens=gained,
        steps=engine.steps - steps,
        seconds=seconds,
        host_seconds=seconds - spent.draft - spent.verify - spent.accept,
        draft_seconds=spent.draft,
        drafted=all_drafted - drafted,
        accepted=all_accepted - accepted,
    )


def _drafted(requests: Sequence[Request]) -> tuple[int, int]:
    return sum(r.acceptance.drafted for r in requests), sum(r.acceptance.accepted for r in requests)


def _row(plain: Sequence[BatchRun], speculative: Sequence[BatchRun], first: BatchRow | None) -> BatchRow:
    drafted = sum(run.drafted for run in speculative)
    found = {
        f"{arm}_{name}": median(getattr(run, name) for run in runs)
        for arm, runs in ((PLAIN, plain), (SPECULATIVE, speculative))
        for name in ("tokens_per_second", "token_ms", "host_ms")
    }
    return BatchRow(
        batch=plain[0].batch,
        **found,
        speedup=median(speedup(speculative, plain)),
        scaling=1.0 if first is None else found["plain_tokens_per_second"] / first.plain_tokens_per_second,
        acceptance=sum(run.accepted for run in speculative) / max(drafted, 1),
        tokens_per_pass=median(run.tokens_per_pass for run in speculative),
    )
