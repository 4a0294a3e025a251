"""How decoding scales with the batch, plain and speculative, and what the engine itself costs per step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median
from time import perf_counter

from foreword.acceptance.params import SamplingParams
from foreword.drafters.overrides import SpeculationSetting
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest
from foreword.engine.pipeline import StepPipeline
from foreword.engine.requests.request import Request
from foreword.errors import RequestError


@dataclass(frozen=True)
class BatchRun:
    """Decoding with a full batch, after the prompts."""

    batch: int
    tokens: int  # committed
    steps: int
    seconds: float
    host_seconds: float  # outside drafting, the forward pass and acceptance
    draft_seconds: float
    drafted: int
    accepted: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def token_ms(self) -> float:
        """Mean time between two tokens of one request."""
        return 1e3 * self.seconds * self.batch / self.tokens

    @property
    def host_ms(self) -> float:
        return 1e3 * self.host_seconds / self.steps


@dataclass(frozen=True)
class BatchRow:
    """Plain and speculative decoding at one batch size; medians of several runs that took turns."""

    batch: int
    plain_tokens_per_second: float
    plain_token_ms: float
    plain_host_ms: float
    speculative_tokens_per_second: float
    speculative_token_ms: float
    speculative_host_ms: float
    speedup: float  # speculative over plain throughput: median of the ratios of neighbouring runs
    scaling: float  # plain throughput over that of the first batch size
    acceptance: float  # guesses committed / guesses judged
    tokens_per_pass: float  # of one request


def measure_batches(
    engine: EngineCore,
    prompts: Sequence[Sequence[int]],
    batches: Sequence[int],
    tokens: int,
    repeats: int,
    on_progress: Callable[[str, int, int], None],
) -> list[BatchRow]:
    """Every batch size, `repeats` times plain and speculative in turns, about `tokens` for each request."""
    if engine.drafters.default is None:
        raise RequestError("a speculative configuration is needed to compare with")
    if repeats < 1 or tokens < 2 or not batches or min(batches) < 1:
        raise RequestError("--repeats and every batch must be at least 1, --tokens at least 2")
    rows: list[BatchRow] = []
    for place, batch in enumerate(batches):
        chosen = list(islice(cycle(prompts), batch))
        plain, speculative = [], []
        for repeat in range(repeats):
            on_progress(f"batch {batch}", place * repeats + repeat, len(batches) * repeats)
            plain.append(run_batch(engine, chosen, tokens, speculate=False))
            speculative.append(run_batch(engine, chosen, tokens, speculate=True))
        rows.append(_row(plain, speculative, rows[0] if rows else None))
    return rows


def run_batch(
    engine: EngineCore,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    speculate: SpeculationSetting,
    warm: int = 0,
) -> BatchRun:
    """Read the prompts, then decode with all of them until they have gained this many tokens on average.

    With `speculate` the engine's own drafter guesses, or the one that it names. `warm` tokens before that do not count:
    drafters elsewhere have to read the prompts too.
    """
    room = _room(engine, prompts, tokens + warm)
    params = SamplingParams(temperature=0, max_tokens=room, ignore_eos=True)
    setting = {"fixed": True} if speculate is True else speculate
    requests = [
        engine.add(NewRequest(f"batch-{index}", tuple(prompt), params, speculation=setting))[0]
        for index, prompt in enumerate(prompts)
    ]
    pipeline = StepPipeline(engine)
    try:
        while not all(request.output_ids for request in requests):
            pipeline.advance()
        if warm:
            _decode(engine, pipeline, requests, warm * len(requests))
        return _decode(engine, pipeline, requests, tokens * len(requests))
    finally:
        for request in requests:
            engine.abort(request.name)
        while pipeline.is_busy:
            pipeline.advance()


def _room(engine: EngineCore, prompts: Sequence[Sequence[int]], tokens: int) -> int:
    """Tokens that no request reaches while the others gain theirs; early ones run ahead."""
    longest = max(len(prompt) for prompt in prompts)
    room = engine.max_model_len - longest
    if room < 4 * tokens:
        raise RequestError(
            f"a prompt of {longest} tokens leaves no room for {4 * tokens} more; lower --tokens"
        )
    return room


def _decode(engine: EngineCore, pipeline: StepPipeline, requests: Sequence[Request], wanted: int) -> BatchRun:
    had = sum(len(request.tokens) for request in requests)
    drafted, accepted = _guesses(requests)
    before, steps = engine.seconds, engine.steps
    began, gained = perf_counter(), 0
    while gained < wanted:
        pipeline.advance()
        gained = sum(len(request.tokens) for request in requests) - had
    seconds, spent = perf_counter() - began, engine.seconds - before
    if any(request.finish_reason is not None for request in requests):
        raise RequestError("a request ended before the measurement; lower --tokens or enlarge the KV cache")
    all_drafted, all_accepted = _guesses(requests)
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


def _guesses(requests: Sequence[Request]) -> tuple[int, int]:
    return sum(r.acceptance.drafted for r in requests), sum(r.acceptance.accepted for r in requests)


def _row(plain: Sequence[BatchRun], speculative: Sequence[BatchRun], first: BatchRow | None) -> BatchRow:
    throughput = median(run.tokens_per_second for run in plain)
    pairs = zip(plain, speculative, strict=True)
    drafted = sum(run.drafted for run in speculative)
    return BatchRow(
        batch=plain[0].batch,
        plain_tokens_per_second=throughput,
        plain_token_ms=median(run.token_ms for run in plain),
        plain_host_ms=median(run.host_ms for run in plain),
        speculative_tokens_per_second=median(run.tokens_per_second for run in speculative),
        speculative_token_ms=median(run.token_ms for run in speculative),
        speculative_host_ms=median(run.host_ms for run in speculative),
        speedup=median(b.tokens_per_second / a.tokens_per_second for a, b in pairs),
        scaling=1.0 if first is None else throughput / first.plain_tokens_per_second,
        acceptance=sum(run.accepted for run in speculative) / max(drafted, 1),
        tokens_per_pass=median(run.tokens / (run.steps * run.batch) for run in speculative),
    )
