"""Decodes one prompt and records passes and times."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from time import perf_counter, process_time
from typing import Any

from foreword.acceptance.params import SamplingParams
from foreword.drafters.config import SpeculationSetting
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest
from foreword.engine.requests.request import Request
from foreword.errors import RequestError
from foreword.speculation.drafting import added_memory

OnTokens = Callable[[Sequence[int]], None]
"""Called with new tokens after every pass that committed any."""

_PASSES_PER_QUESTION = 16
"""Passes between two reads of a drafter's memory, whose time is excluded."""


@dataclass(frozen=True)
class DecodeRun:
    """One answer. Except for memory and the answer itself, only decoding counts, without prefill."""

    tokens: int  # committed while decoding
    passes: int  # target passes
    drafted: int  # verified draft tokens
    accepted: int  # committed draft tokens
    seconds: float  # wall-clock
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float
    memory_bytes: int | None  # maximum that the drafter reported
    token_ids: tuple[int, ...]  # the whole answer
    drafted_per_position: tuple[int, ...] = ()  # drafts with a token at this position
    accepted_per_position: tuple[int, ...] = ()  # drafts accepted up to this position
    cpu_seconds: float = 0.0  # of this process; 0: another device did the work

    @property
    def rest_seconds(self) -> float:
        return self.seconds - self.draft_seconds - self.verify_seconds - self.accept_seconds


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
    before, acceptance = engine.seconds, replace(request.acceptance)
    passes_before = request.accounting.passes
    tokens_before = len(request.tokens)
    memory = _MemoryQuestions(request)
    began, cpu_start = perf_counter(), process_time()
    while request.finish_reason is None:
        memory.ask_now_and_then()
        _step(engine, request, on_tokens)
    cpu_seconds = (
        process_time() - cpu_start - memory.cpu_seconds if engine.target.device.type == "cpu" else 0.0
    )
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
        cpu_seconds=cpu_seconds,
    )


class _MemoryQuestions:
    """Reads the drafter's memory during the request, since lookups release it at the end."""

    def __init__(self, request: Request) -> None:
        self._drafters = [] if request.speculation is None else [request.speculation.drafter]
        self._passes = 0
        self.largest: int | None = None  # maximum reported
        self.seconds = self.cpu_seconds = 0.0  # time of the reads

    def ask_now_and_then(self) -> None:
        """Read before the first two passes and then before every sixteenth."""
        if self._passes < 2 or self._passes % _PASSES_PER_QUESTION == 0:
            wall_start, cpu_start = perf_counter(), process_time()
            answer = added_memory(self._drafters)
            self.largest = answer if self.largest is None else max(self.largest, answer or 0)
            self.seconds += perf_counter() - wall_start
            self.cpu_seconds += process_time() - cpu_start
        self._passes += 1


def _step(engine: EngineCore, request: Request, on_tokens: OnTokens | None) -> None:
    had = len(request.tokens)
    engine.step()
    if request.answer.error is not None:
        raise RequestError(f"the prompt could not be answered: {request.answer.error}")
    if on_tokens is not None and len(request.tokens) > had:
        on_tokens(request.tokens[had:])


@dataclass(frozen=True)
class Record:
    """One drafter on one prompt, with plain decoding of the prompt in the same run."""

    drafter: str  # label of the method
    prompt: str  # key of the prompt
    category: str
    speculative: DecodeRun
    plain: DecodeRun

    @property
    def identical(self) -> bool:
        """Whether the text is unchanged."""
        return self.speculative.token_ids == self.plain.token_ids

    @property
    def speedup(self) -> float:
        """Tokens per second relative to plain decoding."""
        plain, own = self.plain, self.speculative
        return (
            own.tokens * plain.seconds / (own.seconds * plain.tokens) if own.seconds and plain.tokens else 1.0
        )

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "Record":
        """Restore from JSON; raise ValueError if invalid."""
        try:
            runs = {name: _run(value[name]) for name in ("speculative", "plain")}
            return Record(str(value["drafter"]), str(value["prompt"]), str(value["category"]), **runs)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a measurement: {error}") from None


def cpu_speedup(records: Sequence[Record]) -> float | None:
    """Return the speed-up by CPU time, which other processes do not affect.

    None: another device did some of the work. Answers of one token took no time.
    """
    decoded = [record for record in records if record.plain.tokens and record.speculative.tokens]
    speculative_runs, plain = [record.speculative for record in decoded], [record.plain for record in decoded]
    if not decoded or not all(run.cpu_seconds for run in (*speculative_runs, *plain)):
        return None
    rates = [
        sum(run.tokens for run in runs) / sum(run.cpu_seconds for run in runs)
        for runs in (speculative_runs, plain)
    ]
    return rates[0] / rates[1]


def _run(value: Mapping[str, Any]) -> DecodeRun:
    # Files of earlier versions have no positions.
    known = {
        f.name: value[f.name] if f.default is MISSING else value.get(f.name, f.default)
        for f in fields(DecodeRun)
    }
    fitting: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in known.items()}
    return DecodeRun(**fitting)
