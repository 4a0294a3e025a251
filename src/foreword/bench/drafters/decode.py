"""Decodes one prompt, and counts tokens, passes and times."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from time import perf_counter, process_time

from foreword.acceptance.params import SamplingParams
from foreword.bench.skeleton import ratio
from foreword.drafters.config import SpeculationSetting
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest
from foreword.engine.requests.request import Request
from foreword.errors import RequestError
from foreword.speculation.drafting import added_memory

OnTokens = Callable[[Sequence[int]], None]  # called with the new tokens of every pass that committed any
_PASSES_PER_READ = 16  # passes between two reads of a drafter's memory
_TIMES = ("seconds", "draft_seconds", "verify_seconds", "accept_seconds", "cpu_seconds")


def summed(lists: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the element-wise sum of lists, which may differ in length."""
    return tuple(map(sum, zip_longest(*lists, fillvalue=0)))


@dataclass(frozen=True, kw_only=True)
class DecodeFigures:
    """Counts and times of decoding, and their ratios."""

    tokens: int  # committed
    passes: int  # target passes
    seconds: float  # wall-clock time
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float
    drafted_per_position: tuple[int, ...] = ()  # drafts with a token at this position
    accepted_per_position: tuple[int, ...] = ()  # drafts accepted up to this position
    cpu_seconds: float = 0.0  # of this process; 0: another device did the work

    @property
    def tokens_per_second(self) -> float:
        return ratio(self.tokens, self.seconds)

    @property
    def tokens_per_pass(self) -> float:
        return ratio(self.tokens, self.passes)

    @property
    def per_position(self) -> list[float]:
        """Fraction of drafts accepted up to each position."""
        return list(map(ratio, self.accepted_per_position, self.drafted_per_position))


@dataclass(frozen=True, kw_only=True)
class DecodeRun(DecodeFigures):
    """One answer. Counts and times are of decoding, without prefill."""

    drafted: int  # verified draft tokens
    accepted: int  # committed draft tokens
    memory_bytes: int | None  # maximum that the drafter reported
    token_ids: tuple[int, ...]  # the whole answer

    @staticmethod
    def total(runs: Sequence["DecodeRun"]) -> "DecodeRun":
        """Return the sums over several answers, with the largest memory and without tokens of answers."""
        sizes = [run.memory_bytes for run in runs if run.memory_bytes is not None]
        names = ("tokens", "passes", "drafted", "accepted")
        added = {name: sum(getattr(run, name) for run in runs) for name in (*names, *_TIMES)}
        return DecodeRun(
            **added,
            memory_bytes=max(sizes, default=None),
            token_ids=(),
            drafted_per_position=summed([run.drafted_per_position for run in runs]),
            accepted_per_position=summed([run.accepted_per_position for run in runs]),
        )

    @property
    def device_seconds(self) -> float:
        """Seconds of drafting, target passes and acceptance."""
        return self.draft_seconds + self.verify_seconds + self.accept_seconds


def decode(
    engine: EngineCore,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    tenant: str = "",
    speculation: SpeculationSetting = None,
    on_tokens: OnTokens | None = None,
) -> DecodeRun:
    """Answer a prompt on an idle engine."""
    (request,) = engine.add(NewRequest("decode", tuple(prompt), params, tenant, speculation))
    try:
        while not request.output_ids and request.finish_reason is None:
            _step(engine, request, on_tokens)
        return _decode_rest(engine, request, on_tokens)
    finally:
        engine.abort(request.name)


def _decode_rest(engine: EngineCore, request: Request, on_tokens: OnTokens | None) -> DecodeRun:
    """Decode until the answer ends; return the counts and times since the end of prefill."""
    before, acceptance = engine.seconds, replace(request.acceptance)
    passes_before, tokens_before = request.accounting.passes, len(request.tokens)
    memory = _DrafterMemory(request)
    began, cpu_start = perf_counter(), process_time()
    while request.finish_reason is None:
        memory.read_if_due()
        _step(engine, request, on_tokens)
    cpu_seconds = process_time() - cpu_start - memory.cpu_seconds
    seconds, spent = perf_counter() - began - memory.seconds, engine.seconds - before
    return DecodeRun(
        tokens=len(request.tokens) - tokens_before,
        passes=request.accounting.passes - passes_before,
        drafted=request.acceptance.drafted - acceptance.drafted,
        accepted=request.acceptance.accepted - acceptance.accepted,
        seconds=seconds,
        draft_seconds=spent.draft,
        verify_seconds=spent.verify,
        accept_seconds=spent.accept,
        memory_bytes=memory.largest,
        token_ids=tuple(request.output_ids),
        drafted_per_position=tuple(request.acceptance.drafted_per_position),
        accepted_per_position=tuple(request.acceptance.accepted_per_position),
        cpu_seconds=cpu_seconds if engine.target.device.type == "cpu" else 0.0,
    )


class _DrafterMemory:
    """Reads the memory of a request's drafter before some passes, since lookups release it at the end."""

    def __init__(self, request: Request) -> None:
        self._drafters = [] if request.speculation is None else [request.speculation.drafter]
        self._passes = 0
        self.largest: int | None = None  # maximum reported
        self.seconds = self.cpu_seconds = 0.0  # time of the reads

    def read_if_due(self) -> None:
        """Read the memory before the first two passes, and then before every sixteenth."""
        if self._passes < 2 or self._passes % _PASSES_PER_READ == 0:
            wall_start, cpu_start = perf_counter(), process_time()
            size = added_memory(self._drafters)
            self.largest = size if self.largest is None else max(self.largest, size or 0)
            self.seconds += perf_counter() - wall_start
            self.cpu_seconds += process_time() - cpu_start
        self._passes += 1


def _step(engine: EngineCore, request: Request, on_tokens: OnTokens | None) -> None:
    before = len(request.tokens)
    engine.step()
    if request.answer.error is not None:
        raise RequestError(f"the prompt could not be answered: {request.answer.error}")
    if on_tokens is not None and len(request.tokens) > before:
        on_tokens(request.tokens[before:])


@dataclass(frozen=True)
class Record:
    """One drafter on one prompt, and plain decoding of the same prompt in the same run."""

    drafter: str  # label of the method
    prompt: str  # key of the prompt
    category: str
    speculative: DecodeRun
    plain: DecodeRun

    @property
    def identical(self) -> bool:
        """Whether both texts are equal."""
        return self.speculative.token_ids == self.plain.token_ids

    @property
    def speedup(self) -> float:
        """Tokens per second relative to plain decoding; 1 for an answer without decoding."""
        plain, speculative = self.plain, self.speculative
        if not speculative.seconds or not plain.tokens:
            return 1.0
        return speculative.tokens_per_second / plain.tokens_per_second


def cpu_speedup(records: Iterable[Record]) -> float | None:
    """Return the speed-up by CPU time, which other processes do not affect.

    None: another device did some of the work. Answers of one token do not count, since they have no decoding.
    """
    decoded = [record for record in records if record.plain.tokens and record.speculative.tokens]
    speculative, plain = [record.speculative for record in decoded], [record.plain for record in decoded]
    if not decoded or not all(run.cpu_seconds for run in (*speculative, *plain)):
        return None
    total, plain_total = DecodeRun.total(speculative), DecodeRun.total(plain)
    return (total.tokens / total.cpu_seconds) / (plain_total.tokens / plain_total.cpu_seconds)
