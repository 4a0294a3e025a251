"""Measures the controller under changing conditions, and plain requests next to speculative ones."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from statistics import fmean
from time import perf_counter, sleep

from foreword.bench.control import timeline
from foreword.bench.control.windows import MIXED, PLAIN_ARM, ControlArm
from foreword.bench.skeleton import staged
from foreword.drafters.combined import FallbackDrafter, RoutedDrafter
from foreword.progress import StageProgress
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftTask


@dataclass
class Brake:
    """Slows all drafters of an engine by a factor."""

    factor: float = 1.0

    @contextmanager
    def pulled(self, factor: float) -> Iterator[None]:
        """Multiply the time of every call by `factor` within the block."""
        self.factor = factor
        try:
            yield
        finally:
            self.factor = 1.0


class SlowedDrafter(FallbackDrafter):
    """A drafter that is slowed by a brake."""

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
    """Return the drafter with the brake on it, or on each of its choices."""
    choices = {name: SlowedDrafter(one, brake) for name, one in drafter.choices.items()}
    return RoutedDrafter(choices) if choices else SlowedDrafter(drafter, brake)


LEAST_WORST = 0.9  # minimum ratio to plain decoding in the worst five seconds

OFF_WITHIN, ON_WITHIN = 3.0, 10.0
"""Seconds within which useless drafting must stop, and useful drafting start."""


ChangedCondition = tuple[str, Mapping[str, timeline.Phase]]
"""Name of a change, and its phases by name: before it, during it and, if it is temporary, after it."""


@dataclass(frozen=True)
class Reaction:
    """Reaction of the controller to a change."""

    condition: str
    phase: str
    seconds: float  # until the rate settled, or reached plain decoding if speculation has no gain
    within: float  # allowed seconds
    ratio: float  # settled rate relative to plain decoding under the same conditions
    worst: float  # ratio in the worst five seconds


def conditions(
    good: str,
    bad: str,
    most_batch: int,
    seconds: float,
    slow_drafter: timeline.Circumstances,
    busy_core: timeline.Circumstances,
) -> list[ChangedCondition]:
    """Return the changes to measure; speculation gains on `good` texts and hardly on `bad` ones."""
    alone = timeline.Phase(good, 1, seconds)
    slow, busy = timeline.Phase(good, 1, seconds, slow_drafter), timeline.Phase(good, 1, seconds, busy_core)
    large = timeline.Phase(good, most_batch, 2 * seconds)
    return [
        (
            "texts of another kind",
            {"before": alone, "changed": timeline.Phase(bad, 1, seconds), "back": alone},
        ),
        ("drafter ten times as slow", {"before": alone, "slow": slow, "back": alone}),
        ("another process takes a core", {"before": alone, "busy": busy, "back": alone}),
        ("batch grows", {"one": alone, f"{most_batch}": large, "one again": alone}),
    ]


def measure_conditions(
    line: timeline.EngineLine,
    changes: Sequence[ChangedCondition],
    controller: ControlArm,
    on_progress: StageProgress,
) -> list[Reaction]:
    """Run every change twice: with plain decoding as reference, and with the controller."""
    found = []
    for change, phases in staged(changes, on_progress, lambda one: one[0]):
        plain_runs, own = (line.run(arm, list(phases.values())) for arm in (PLAIN_ARM, controller))
        runs = list(zip(phases, map(timeline.decoding, plain_runs), map(timeline.decoding, own), strict=True))
        for number, (phase, plain, steps) in enumerate(runs[1:]):
            rate, settled = sum(step.tokens for step in plain) / plain[-1].end, timeline.settled_rate(steps)
            within, aim = (ON_WITHIN, settled) if number else (OFF_WITHIN, min(settled, rate))
            seconds, worst = timeline.reaction_seconds(steps, aim), timeline.worst_ratio(steps, rate)
            found.append(Reaction(change, phase, seconds, within, settled / rate, worst))
    return found


@contextmanager
def busy_core() -> Iterator[None]:
    """Run another process that keeps a core busy."""
    other = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    try:
        yield
    finally:
        other.kill()
        other.wait()


MOST_RATIO, MIXED_TURNS = 1.05, 3
"""Maximum ratio of plain requests' times next to others, and runs of both kinds."""


@dataclass(frozen=True)
class MixedTraffic:
    """Time per token of plain requests, alone and next to speculative ones.

    Times are means over whole answers, because drafts of others lengthen single steps only.
    """

    batch: int
    plain_ms: float  # p95 if all requests are plain
    mixed_ms: float  # p95 of plain requests next to speculative ones
    gap_ratio: float  # ratio of the p95 of single tokens
    others_gain: float | None  # speed of the speculative requests relative to plain; None: not measured

    @property
    def ratio(self) -> float:
        return self.mixed_ms / self.plain_ms

    @property
    def line(self) -> str:
        """Return one line for people."""
        others = "" if self.others_gain is None else f"; the others {self.others_gain:.2f} of its speed"
        return (
            f"plain requests, half of a batch of {self.batch}: p95 {self.mixed_ms:.1f} ms a token, "
            f"{self.ratio:.2f} of an all-plain run ({self.gap_ratio:.2f} for single tokens){others}"
        )


def measure_mixed(
    line: timeline.EngineLine, controller: ControlArm, batch: int, seconds: float
) -> MixedTraffic:
    """Run plain and mixed batches in turns."""
    half = ControlArm(controller.label, controller.setting, is_half=True)
    phase = timeline.Phase(MIXED, batch, seconds / MIXED_TURNS)
    alone: list[timeline.Step] = []
    together: list[timeline.Step] = []
    for _ in range(MIXED_TURNS):
        alone += line.run(PLAIN_ARM, [phase])[0]
        together += line.run(half, [phase])[0]
    # On a slow machine no answer may end; then use single tokens.
    plain, mixed = _per_token(alone, True) or _waits(alone), _per_token(together, True) or _waits(together)
    others = _per_token(together, False)
    return MixedTraffic(
        batch,
        1e3 * percentile(plain, 0.95),
        1e3 * percentile(mixed, 0.95),
        percentile(_waits(together), 0.95) / percentile(_waits(alone), 0.95),
        fmean(plain) / fmean(others) if others else None,
    )


def _per_token(steps: Sequence[timeline.Step], is_plain: bool) -> list[float]:
    ended = (one for step in steps for one in step.ended)
    return [one.seconds_per_token for one in ended if one.is_plain == is_plain]


def _waits(steps: Sequence[timeline.Step]) -> list[float]:
    return [seconds for step in steps for seconds in step.plain_seconds]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this fraction of the values does not exceed."""
    return sorted(values)[max(ceil(share * len(values)) - 1, 0)]
