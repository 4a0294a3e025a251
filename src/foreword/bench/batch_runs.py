"""Decodes full batches of requests on an engine, and measures tokens and times."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import sub
from statistics import median
from time import perf_counter

from foreword.acceptance.params import SamplingParams
from foreword.bench.skeleton import ratios_by_round
from foreword.drafters.config import SpeculationSetting
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest
from foreword.engine.requests.request import Request
from foreword.engine.step_pipeline import StepPipeline
from foreword.errors import RequestError
from foreword.speculation.report import StageSeconds


@dataclass(frozen=True)
class BatchRun:
    """Counts and times of decoding with a full batch, without prefill."""

    batch: int
    tokens: int  # committed
    steps: int
    seconds: float
    spent: StageSeconds
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
        """Time of a step outside drafting, forward pass and acceptance."""
        return self._per_step(self.seconds - self.spent.draft - self.spent.verify - self.spent.accept)

    @property
    def draft_ms(self) -> float:
        return self._per_step(self.spent.draft)

    @property
    def step_ms(self) -> float:
        return self._per_step(self.seconds)

    def _per_step(self, seconds: float) -> float:
        return 1e3 * seconds / self.steps

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens per request and pass."""
        return self.tokens / (self.steps * self.batch)


def medians(runs: Sequence[BatchRun], *attributes: str) -> list[float]:
    """Return the median of each of these attributes over all runs."""
    return [median(getattr(run, name) for run in runs) for name in attributes]


def speedup(runs: Sequence[BatchRun], plain: Sequence[BatchRun]) -> list[float]:
    """Return each run's throughput relative to plain decoding of the same round."""
    return ratios_by_round([run.tokens_per_second for run in runs], [run.tokens_per_second for run in plain])


def greedy_requests(
    name: str, prompts: Iterable[Sequence[int]], tokens: int, speculation: SpeculationSetting = None
) -> list[NewRequest]:
    """Return a greedy request for each prompt, whose answer has exactly `tokens` tokens."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [
        NewRequest(f"{name}-{index}", tuple(prompt), params, speculation=speculation)
        for index, prompt in enumerate(prompts)
    ]


@contextmanager
def full_batch(
    engine: EngineCore, wanted: Sequence[NewRequest], advance: Callable[[], object]
) -> Iterator[list[Request]]:
    """Yield these requests when all have finished prefill; abort them at the end of the block.

    `advance` runs the engine's next step.
    """
    requests = [engine.add(new)[0] for new in wanted]
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
    _: int = 0,
    *,
    warm: int = 0,
) -> BatchRun:
    """Measure decoding after prefill, until the requests have gained `tokens` tokens on average.

    With `speculate` True, the engine's default drafter drafts at every step. The first `warm` tokens do not count,
    because remote drafters must process the prompts first. The unused parameter is the round's number, with which
    `take_turns` calls an arm.
    """
    setting = {"fixed": True} if speculate is True else speculate
    wanted = greedy_requests("batch", prompts, _room(engine, prompts, tokens + warm), setting)
    pipeline = StepPipeline(engine)
    try:
        with full_batch(engine, wanted, pipeline.advance) as requests:
            if warm:
                _decode(engine, pipeline, requests, warm * len(requests))
            return _decode(engine, pipeline, requests, tokens * len(requests))
    finally:
        while pipeline.is_busy:
            pipeline.advance()


def _room(engine: EngineCore, prompts: Sequence[Sequence[int]], tokens: int) -> int:
    """Return `max_tokens` of the requests, which none reaches before all have gained `tokens` tokens on average.

    Requests gain at different speeds, so the limit is at least four times the average.
    """
    longest = max(len(prompt) for prompt in prompts)
    room = engine.max_model_len - longest
    if room < 4 * tokens:
        raise RequestError(
            f"a prompt of {longest} tokens leaves no room for {4 * tokens} more; lower --tokens"
        )
    return room


def _decode(engine: EngineCore, pipeline: StepPipeline, requests: Sequence[Request], wanted: int) -> BatchRun:
    """Measure decoding until the requests have gained `wanted` tokens in all."""
    end_total = wanted + sum(len(request.tokens) for request in requests)

    def decode() -> None:
        while sum(len(request.tokens) for request in requests) < end_total:
            pipeline.advance()

    run = measured(engine, requests, decode)
    if any(request.finish_reason is not None for request in requests):
        raise RequestError("a request ended before the measurement; lower --tokens or enlarge the KV cache")
    return run


def measured(engine: EngineCore, requests: Sequence[Request], decode: Callable[[], None]) -> BatchRun:
    """Call `decode`; return the counts and times that it added to these requests and to the engine."""
    counts_before, steps_before, spent_before = _counts(requests), engine.steps, engine.seconds
    began = perf_counter()
    decode()
    seconds = perf_counter() - began
    tokens, drafted, accepted = map(sub, _counts(requests), counts_before)
    steps, spent = engine.steps - steps_before, engine.seconds - spent_before
    return BatchRun(len(requests), tokens, steps, seconds, spent, drafted, accepted)


def _counts(requests: Sequence[Request]) -> tuple[int, int, int]:
    """Return the numbers of tokens, of verified draft tokens and of accepted ones."""
    tokens = sum(len(request.tokens) for request in requests)
    drafted = sum(request.acceptance.drafted for request in requests)
    return tokens, drafted, sum(request.acceptance.accepted for request in requests)
