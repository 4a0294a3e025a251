"""A closed loop of requests whose kind, number or circumstances change while it runs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count, pairwise
from statistics import median
from time import perf_counter
from typing import Protocol

from foreword.acceptance.params import SamplingParams
from foreword.bench.control.windows import Arm, Prompts
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest
from foreword.engine.requests.request import Request

ANSWER_TOKENS = 96


@dataclass(frozen=True)
class Phase:
    """A stretch of a run in which nothing changes."""

    kind: str
    batch: int
    seconds: float
    circumstances: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class Step:
    """One step of a run."""

    end: float  # seconds since its phase began
    tokens: int
    plain_seconds: Sequence[float] = ()  # what the requests that decode plainly waited for their token
    ended: Sequence["Ended"] = ()  # answers that ended with it


@dataclass(frozen=True)
class Ended:
    """An answer, after its first token."""

    is_plain: bool
    seconds_per_token: float


class Line(Protocol):
    """Runs phases one after the other."""

    def run(self, arm: Arm, phases: Sequence[Phase]) -> list[list[Step]]:
        """The steps of every phase that made tokens."""
        ...


@dataclass
class EngineLine:
    """Phases on an engine; a request that ends is followed by another at once."""

    engine: EngineCore
    prompts: Prompts
    clock: Callable[[], float] = perf_counter
    _numbers: "count[int]" = field(default_factory=count)
    _running: list[Request] = field(default_factory=list)
    _begun: dict[str, tuple[float, int]] = field(default_factory=dict)  # when, and with how many tokens

    def run(self, arm: Arm, phases: Sequence[Phase]) -> list[list[Step]]:
        """All requests are one tenant's, so that what is known of them is known of the next."""
        tenant = f"line {next(self._numbers)}"
        try:
            return [self._phase(arm, phase, tenant) for phase in phases]
        finally:
            self._trim(0)

    def _phase(self, arm: Arm, phase: Phase, tenant: str) -> list[Step]:
        self._trim(0)  # requests of another kind
        steps = []
        with phase.circumstances():
            began = self.clock()
            while (now := self.clock()) - began < phase.seconds:
                self._fill(arm, phase, tenant)
                had = sum(len(request.tokens) for request in self._running)
                self.engine.step()
                gained = sum(len(request.tokens) for request in self._running) - had
                end = self.clock()
                waited = [end - now for one in self._running if one.speculation is None and one.output_ids]
                steps.append(Step(end - began, gained, waited, self._ended(end)))
                self._running = [request for request in self._running if request.finish_reason is None]
        return steps

    def _ended(self, now: float) -> list[Ended]:
        """Answers that have just ended, and from now on those that have just begun."""
        found = []
        for request in self._running:
            if request.output_ids and request.name not in self._begun:
                self._begun[request.name] = (now, len(request.output_ids))
            if request.finish_reason is not None and request.name in self._begun:
                began, had = self._begun.pop(request.name)
                tokens = max(len(request.output_ids) - had, 1)
                found.append(Ended(request.speculation is None, (now - began) / tokens))
        return found

    def _fill(self, arm: Arm, phase: Phase, tenant: str) -> None:
        params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        while len(self._running) < phase.batch:
            number = next(self._numbers)
            (ids,) = self.prompts.take(phase.kind, number, 1)
            plain = sum(request.speculation is None for request in self._running)
            setting = False if arm.is_half and 2 * plain < phase.batch else arm.setting
            new = NewRequest(f"{tenant}-{number}", tuple(ids), params, tenant, setting)
            self._running += self.engine.add(new)

    def _trim(self, size: int) -> None:
        for request in self._running[size:]:
            self.engine.abort(request.name)
            self._begun.pop(request.name, None)
        del self._running[size:]


def rates_by_second(
    steps: Sequence[Step], width: float = 1.0, stride: float = 0.25
) -> list[tuple[float, float]]:
    """(where a stretch begins, tokens per second in it) for stretches of this width."""
    if not steps:
        return []
    last, found, begin = steps[-1].end, [], 0.0
    while begin + width <= last + 1e-9:
        tokens = 0.0
        for before, step in pairwise([Step(0.0, 0), *steps]):
            inside = min(step.end, begin + width) - max(before.end, begin)
            if inside > 0:
                tokens += step.tokens * inside / (step.end - before.end)
        found.append((begin, tokens / width))
        begin += stride
    return found


def worst_stretch(steps: Sequence[Step], plain_rate: float, width: float = 5.0) -> float:
    """The lowest rate of any stretch of this many seconds, relative to plain decoding."""
    rates = rates_by_second(steps, min(width, steps[-1].end))
    return min(rate for _, rate in rates) / plain_rate


def settled_rate(steps: Sequence[Step]) -> float:
    """Tokens per second of the second half."""
    rates = [rate for begin, rate in rates_by_second(steps) if begin >= steps[-1].end / 2]
    return median(rates or [rate for _, rate in rates_by_second(steps, steps[-1].end)])


def reaction_seconds(steps: Sequence[Step], tolerance: float = 0.1) -> float:
    """When the rate of a second has come near the one that it settles at, for good."""
    settled = settled_rate(steps)
    slow = [begin for begin, rate in rates_by_second(steps) if rate < (1 - tolerance) * settled]
    return slow[-1] + 1.0 if slow else 0.0
