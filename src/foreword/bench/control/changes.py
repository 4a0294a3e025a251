"""Changes in the middle of a run, and plain requests beside speculative ones."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import ceil
from statistics import fmean
from time import perf_counter, sleep

from foreword.bench.control.timeline import (
    Line,
    Phase,
    Step,
    decoding,
    reaction_seconds,
    settled_rate,
    worst_stretch,
)
from foreword.bench.control.windows import MIXED, PLAIN_ARM, ControlArm
from foreword.drafters.combined import FirstOf, Routed
from foreword.progress import StageProgress
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftTask


class Brake:
    """Shared by all drafters of an engine."""

    def __init__(self) -> None:
        self.factor = 1.0

    @contextmanager
    def pulled(self, factor: float) -> Iterator[None]:
        """Every call takes this many times as long meanwhile."""
        self.factor = factor
        try:
            yield
        finally:
            self.factor = 1.0


class SlowedDrafter(FirstOf):
    """Another drafter whose calls a brake makes longer."""

    def __init__(
        self,
        drafter: Drafter,
        brake: Brake,
        clock: Callable[[], float] = perf_counter,
        wait: Callable[[float], None] = sleep,
    ) -> None:
        super().__init__([drafter])
        self.traits = drafter.traits
        self._brake = brake
        self._clock = clock
        self._wait = wait

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        began = self._clock()
        drafts = super().propose(tasks)
        if self._brake.factor > 1:
            self._wait((self._brake.factor - 1) * (self._clock() - began))
        return drafts


def slowed(drafter: Drafter, brake: Brake) -> Drafter:
    """Return the drafter with a brake; each one of those that a policy chooses between."""
    choices = {name: SlowedDrafter(one, brake) for name, one in drafter.choices.items()}
    return Routed(choices) if choices else SlowedDrafter(drafter, brake)


LEAST_WORST = 0.9
"""Of plain decoding, in the five seconds that go worst."""

OFF_WITHIN, ON_WITHIN = 3.0, 10.0
"""Seconds after a change until drafting without gain is off, and until it is on again."""


@dataclass(frozen=True)
class ChangedCondition:
    """A change and, where it goes away again, its end."""

    name: str
    phases: Mapping[str, Phase]  # by what has happened


@dataclass(frozen=True)
class Reaction:
    """How the controller took a change."""

    condition: str
    phase: str
    seconds: float  # until the rate was near where it settled, or near plain decoding where speculation may not gain
    within: float  # seconds that it should take at most
    ratio: float  # of the rate where it settled, to plain decoding in the same circumstances
    worst: float  # the same of the worst five seconds


@dataclass(frozen=True)
class Circumstances:
    """What can be done to an engine."""

    slow_drafter: Callable[[], AbstractContextManager[object]]
    busy_core: Callable[[], AbstractContextManager[object]]


def conditions(
    good: str, bad: str, most_batch: int, seconds: float, can: Circumstances
) -> list[ChangedCondition]:
    """Return the changes to measure; speculation gains on `good` texts, and hardly on `bad` ones."""
    alone = Phase(good, 1, seconds)
    return [
        ChangedCondition(
            "texts of another kind",
            {"before": alone, "changed": Phase(bad, 1, seconds), "back": alone},
        ),
        ChangedCondition(
            "drafter ten times as slow",
            {"before": alone, "slow": Phase(good, 1, seconds, can.slow_drafter), "back": alone},
        ),
        ChangedCondition(
            "another process takes a core",
            {"before": alone, "busy": Phase(good, 1, seconds, can.busy_core), "back": alone},
        ),
        ChangedCondition(
            "batch grows",
            {"one": alone, f"{most_batch}": Phase(good, most_batch, 2 * seconds), "one again": alone},
        ),
    ]


def measure_conditions(
    line: Line, changes: Sequence[ChangedCondition], controller: ControlArm, on_progress: StageProgress
) -> list[Reaction]:
    """Every change twice: decoding plainly, to compare with, and as the controller likes."""
    found = []
    for place, change in enumerate(changes):
        on_progress(change.name, place, len(changes))
        phases = list(change.phases.values())
        plain, own = line.run(PLAIN_ARM, phases), line.run(controller, phases)
        runs = list(zip(change.phases, map(decoding, plain), map(decoding, own), strict=True))
        for number, (name, plain_steps, steps) in enumerate(runs[1:]):
            within = ON_WITHIN if number else OFF_WITHIN
            found.append(_reaction(change.name, name, plain_steps, steps, within))
    return found


def _reaction(
    condition: str, phase: str, plain: Sequence[Step], steps: Sequence[Step], within: float
) -> Reaction:
    rate = sum(step.tokens for step in plain) / plain[-1].end
    settled = settled_rate(steps)
    aim = settled if within == ON_WITHIN else min(settled, rate)
    seconds, worst = reaction_seconds(steps, aim), worst_stretch(steps, rate)
    return Reaction(condition, phase, seconds, within, settled / rate, worst)


@contextmanager
def busy_core() -> Iterator[None]:
    """Another process that computes and computes."""
    other = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    try:
        yield
    finally:
        other.kill()
        other.wait()


MOST_RATIO = 1.05


@dataclass(frozen=True)
class MixedTraffic:
    """Time per token of requests, in an all-plain run and where half of them speculate.

    Of whole answers: those around it make up for one step that others' drafts lengthen.
    """

    batch: int
    plain_ms: float  # 95th percentile of an all-plain run
    mixed_ms: float  # of the plain requests in a mixed one
    gap_ratio: float  # the same ratio of single tokens
    others_gain: float | None  # speed of those that speculate, relative to an all-plain run; None: not seen

    @property
    def ratio(self) -> float:
        return self.mixed_ms / self.plain_ms

    @property
    def holds(self) -> bool:
        return self.ratio <= MOST_RATIO

    @property
    def line(self) -> str:
        """One line for people."""
        others = "" if self.others_gain is None else f"; the others {self.others_gain:.2f} of its speed"
        return (
            f"plain requests, half of a batch of {self.batch}: p95 {self.mixed_ms:.1f} ms a token, "
            f"{self.ratio:.2f} of an all-plain run ({self.gap_ratio:.2f} for single tokens){others}"
        )


def measure_mixed(
    line: Line, controller: ControlArm, batch: int, seconds: float, turns: int = 3
) -> MixedTraffic:
    """Plain and mixed runs in turns."""
    half = ControlArm(controller.label, controller.setting, is_half=True)
    phase = Phase(MIXED, batch, seconds / turns)
    alone: list[Step] = []
    together: list[Step] = []
    for _ in range(turns):
        alone += line.run(PLAIN_ARM, [phase])[0]
        together += line.run(half, [phase])[0]
    # On a machine that is so slow that no answer ends, single tokens must do.
    plain, mixed = _per_token(alone, True) or _waits(alone), _per_token(together, True) or _waits(together)
    others = _per_token(together, False)
    return MixedTraffic(
        batch,
        1e3 * percentile(plain, 0.95),
        1e3 * percentile(mixed, 0.95),
        percentile(_waits(together), 0.95) / percentile(_waits(alone), 0.95),
        fmean(plain) / fmean(others) if others else None,
    )


def _per_token(steps: Sequence[Step], is_plain: bool) -> list[float]:
    ended = (one for step in steps for one in step.ended)
    return [one.seconds_per_token for one in ended if one.is_plain == is_plain]


def _waits(steps: Sequence[Step]) -> list[float]:
    return [seconds for step in steps for seconds in step.plain_seconds]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of them does not exceed."""
    return sorted(values)[max(ceil(share * len(values)) - 1, 0)]
