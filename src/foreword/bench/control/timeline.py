"""Runs a constant number of requests on an engine while conditions change, and computes rates over time."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from statistics import median
from time import perf_counter

from foreword.acceptance.params import SamplingParams
from foreword.bench.control.windows import ControlArm, Prompts
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest
from foreword.engine.requests.request import Request

ANSWER_TOKENS = 96

Circumstances = Callable[[], AbstractContextManager[object]]  # its block disturbs the engine


@dataclass(frozen=True)
class Phase:
    """A time with constant conditions."""

    kind: str  # category of the prompts
    batch: int
    seconds: float
    circumstances: Circumstances = nullcontext


@dataclass(frozen=True)
class Step:
    """One step of the engine."""

    end: float  # seconds since the start of its phase
    tokens: int
    plain_seconds: Sequence[float] = ()  # the step's seconds, once for each plain request in it
    ended: Sequence["Ended"] = ()  # answers that ended with this step
    reads: bool = False  # whether the step processed prompts


@dataclass(frozen=True)
class Ended:
    """An ended answer; its time is that of steps without prompts."""

    is_plain: bool
    seconds_per_token: float


@dataclass
class EngineLine:
    """Runs phases on an engine; a new request replaces an ended one at once."""

    engine: EngineCore
    prompts: Prompts
    clock: Callable[[], float] = perf_counter
    _numbers: "count[int]" = field(default_factory=count)
    _running: list[Request] = field(default_factory=list)
    # Seconds and tokens of each running request, of steps without prompts.
    _decoding: dict[str, tuple[float, int]] = field(default_factory=dict)

    def run(self, arm: ControlArm, phases: Sequence[Phase]) -> list[list[Step]]:
        """Return the steps of every phase.

        Requests of all phases have the same tenant, so that later phases use the estimates of earlier ones.
        """
        tenant = f"line {next(self._numbers)}"
        try:
            return [self._phase(arm, phase, tenant) for phase in phases]
        finally:
            self._abort_all()

    def _phase(self, arm: ControlArm, phase: Phase, tenant: str) -> list[Step]:
        self._abort_all()  # requests of another category
        steps = []
        with phase.circumstances():
            began = self.clock()
            while (now := self.clock()) - began < phase.seconds:
                self._fill(arm, phase, tenant)
                reads = any(not request.output_ids for request in self._running)
                lengths = [len(request.tokens) for request in self._running]
                self.engine.step()
                end = self.clock()
                gained = [len(r.tokens) - length for r, length in zip(self._running, lengths, strict=True)]
                plain_seconds = []
                if not reads:
                    self._add_step(gained, end - now)
                    plain_seconds = [end - now for one in self._running if one.speculation is None]
                steps.append(Step(end - began, sum(gained), plain_seconds, self._ended(), reads))
                self._running = [request for request in self._running if request.finish_reason is None]
        return steps

    def _add_step(self, gained: Sequence[int], seconds: float) -> None:
        """Add a decode-only step to the times of the running answers."""
        for request, tokens in zip(self._running, gained, strict=True):
            before = self._decoding.get(request.name, (0.0, 0))
            self._decoding[request.name] = before[0] + seconds, before[1] + tokens

    def _ended(self) -> list[Ended]:
        """Return the answers that have just ended."""
        ended = []
        for request in self._running:
            if request.finish_reason is not None:
                seconds, tokens = self._decoding.pop(request.name, (0.0, 0))
                if tokens:
                    ended.append(Ended(request.speculation is None, seconds / tokens))
        return ended

    def _fill(self, arm: ControlArm, phase: Phase, tenant: str) -> None:
        """Add requests until the batch is full; of a half arm, every other one is plain."""
        params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        while len(self._running) < phase.batch:
            number = next(self._numbers)
            (ids,) = self.prompts.take(phase.kind, number, 1)
            plain = sum(request.speculation is None for request in self._running)
            is_plain = arm.is_half and 2 * plain < phase.batch
            setting = False if is_plain else arm.setting
            new = NewRequest(f"{tenant}-{number}", tuple(ids), params, tenant, setting)
            self._running += self.engine.add(new)

    def _abort_all(self) -> None:
        for request in self._running:
            self.engine.abort(request.name)
        self._running.clear()
        self._decoding.clear()


def decoding(steps: Sequence[Step]) -> list[Step]:
    """Return the steps without prompts, timed as if they followed each other; all steps if every one has prompts.

    Prefill is left out because it does not depend on speculation.
    """
    now, decode_steps = 0.0, []
    for before, step in pairwise([Step(0.0, 0), *steps]):
        if not step.reads:
            now += step.end - before.end
            decode_steps.append(replace(step, end=now))
    return decode_steps or list(steps)


def rates_by_second(
    steps: Sequence[Step], width: float = 1.0, stride: float = 0.25
) -> list[tuple[float, float]]:
    """Return (start, tokens per second) of overlapping intervals; `width` and `stride` are in seconds."""
    last, rates, begin = steps[-1].end, [], 0.0
    while begin + width <= last + 1e-9:
        tokens = 0.0
        for before, step in pairwise([Step(0.0, 0), *steps]):
            inside = min(step.end, begin + width) - max(
                before.end, begin
            )  # seconds of the step in the interval
            if inside > 0:
                tokens += step.tokens * inside / (step.end - before.end)
        rates.append((begin, tokens / width))
        begin += stride
    return rates


def worst_ratio(steps: Sequence[Step], plain_rate: float) -> float:
    """Return the lowest rate of any five seconds, relative to plain decoding."""
    rates = rates_by_second(steps, min(5.0, steps[-1].end))
    return min(rate for _, rate in rates) / plain_rate


def settled_rate(steps: Sequence[Step]) -> float:
    """Return the median tokens per second of the second half of the steps' time."""
    rates = [rate for begin, rate in rates_by_second(steps) if begin >= steps[-1].end / 2]
    return median(rates or [rate for _, rate in rates_by_second(steps, steps[-1].end)])


def reaction_seconds(steps: Sequence[Step], aim: float) -> float:
    """Return the seconds until the rate stays above 90% of `aim`."""
    slow = [begin for begin, rate in rates_by_second(steps) if rate < 0.9 * aim]
    return slow[-1] + 1.0 if slow else 0.0
