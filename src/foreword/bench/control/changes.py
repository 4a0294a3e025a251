"""Measures the controller under changing conditions, and plain requests next to speculative ones."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from statistics import fmean
from time import perf_counter, sleep
from typing import Annotated

from foreword.bench.control import timeline
from foreword.bench.control.windows import MIXED, PLAIN_ARM, ControlArm
from foreword.bench.skeleton import InTable, staged
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
    """A drafter whose calls take longer while a brake is pulled."""

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
    """Return the drafter with the brake; if it chooses between several drafters, each has the brake."""
    choices = {name: SlowedDrafter(choice, brake) for name, choice in drafter.choices.items()}
    return RoutedDrafter(choices) if choices else SlowedDrafter(drafter, brake)


LEAST_WORST = 0.9  # minimum ratio to plain decoding in the worst five seconds

OFF_WITHIN, ON_WITHIN = 3.0, 10.0
"""Seconds within which drafting without gain must stop, and drafting with a gain must start."""


ChangedCondition = tuple[str, Mapping[str, timeline.Phase]]
"""Name of a change, and its phases by name: before it, during it and, if it is temporary, after it."""


@dataclass(frozen=True)
class Reaction:
    """Reaction of the controller to a change."""

    condition: Annotated[str, InTable("what changes")]  # name of the change
    phase: Annotated[str, InTable("")]  # name of the phase that begins with the change
    # Until the rate settled, or reached plain decoding if speculation has no gain.
    seconds: Annotated[float, InTable("settled\nafter s", ".1f")]
    within: float  # allowed seconds
    ratio: Annotated[float, InTable("then\nx plain", ".2f")]  # settled rate relative to plain decoding
    worst: Annotated[float, InTable("worst 5 s\nx plain", ".2f")]  # ratio in the worst five seconds


def conditions(
    good: str,
    bad: str,
    most_batch: int,
    seconds: float,
    slow_drafter: timeline.Circumstances,
    busy_core: timeline.Circumstances,
) -> list[ChangedCondition]:
    """Return the changes to measure; speculation has a gain on texts of the category `good`, and hardly on `bad`."""
    usual, other_texts = timeline.Phase(good, 1, seconds), timeline.Phase(bad, 1, seconds)
    slow, busy = timeline.Phase(good, 1, seconds, slow_drafter), timeline.Phase(good, 1, seconds, busy_core)
    large = timeline.Phase(good, most_batch, 2 * seconds)
    return [
        ("texts of another kind", {"before": usual, "changed": other_texts, "back": usual}),
        ("drafter ten times as slow", {"before": usual, "slow": slow, "back": usual}),
        ("another process takes a core", {"before": usual, "busy": busy, "back": usual}),
        ("batch grows", {"one": usual, f"{most_batch}": large, "one again": usual}),
    ]


def measure_conditions(
    line: timeline.EngineLine,
    changes: Sequence[ChangedCondition],
    controller: ControlArm,
    on_progress: StageProgress,
) -> list[Reaction]:
    """Return the reaction to every phase after a change's first; plain decoding of the same phases is the reference.

    In the second phase drafting may have lost its gain and must stop; in the third it must start again.
    """
    reactions = []
    for change, phases in staged(changes, on_progress, lambda change: change[0]):
        planned = list(phases.values())
        plain_steps = map(timeline.decoding, line.run(PLAIN_ARM, planned))
        steps_of_controller = map(timeline.decoding, line.run(controller, planned))
        measured = list(zip(phases, plain_steps, steps_of_controller, strict=True))
        for number, (phase, plain, steps) in enumerate(measured[1:]):
            plain_rate = sum(step.tokens for step in plain) / plain[-1].end
            settled = timeline.settled_rate(steps)
            within, aim = OFF_WITHIN, min(settled, plain_rate)
            if number > 0:
                within, aim = ON_WITHIN, settled
            seconds, worst = timeline.reaction_seconds(steps, aim), timeline.worst_ratio(steps, plain_rate)
            reactions.append(Reaction(change, phase, seconds, within, settled / plain_rate, worst))
    return reactions


@contextmanager
def busy_core() -> Iterator[None]:
    """Run another process that keeps a core busy."""
    other = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    try:
        yield
    finally:
        other.kill()
        other.wait()


MOST_RATIO = 1.05  # maximum ratio of plain requests' times next to speculative ones, to those without
MIXED_TURNS = 3  # runs of plain batches and of mixed ones


@dataclass(frozen=True)
class MixedTraffic:
    """Time per token of plain requests, alone and next to speculative ones.

    Times are means over whole answers, because drafts of other requests lengthen single steps only.
    """

    batch: int
    plain_ms: float  # p95 over the answers if all requests are plain
    mixed_ms: float  # p95 over the answers of plain requests next to speculative ones
    gap_ratio: float  # ratio of the p95 of single tokens' times
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
    """Compare plain requests of all-plain batches with those of half-plain batches; each kind runs for `seconds`."""
    half = ControlArm(controller.label, controller.setting, is_half=True)
    phase = timeline.Phase(MIXED, batch, seconds / MIXED_TURNS)
    alone: list[timeline.Step] = []
    mixed: list[timeline.Step] = []
    for _ in range(MIXED_TURNS):
        alone += line.run(PLAIN_ARM, [phase])[0]
        mixed += line.run(half, [phase])[0]
    # On a slow machine no answer may end; then times of single tokens are compared.
    plain_alone = _answer_times(alone, is_plain=True) or _token_times(alone)
    plain_mixed = _answer_times(mixed, is_plain=True) or _token_times(mixed)
    speculative = _answer_times(mixed, is_plain=False)
    return MixedTraffic(
        batch,
        1e3 * percentile(plain_alone, 0.95),
        1e3 * percentile(plain_mixed, 0.95),
        percentile(_token_times(mixed), 0.95) / percentile(_token_times(alone), 0.95),
        fmean(plain_alone) / fmean(speculative) if speculative else None,
    )


def _answer_times(steps: Sequence[timeline.Step], *, is_plain: bool) -> list[float]:
    """Return the mean seconds per token of each ended answer, plain or speculative."""
    answers = (answer for step in steps for answer in step.ended)
    return [answer.seconds_per_token for answer in answers if answer.is_plain == is_plain]


def _token_times(steps: Sequence[timeline.Step]) -> list[float]:
    """Return the seconds of each token of plain requests."""
    return [seconds for step in steps for seconds in step.plain_seconds]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this fraction of the values does not exceed."""
    return sorted(values)[max(ceil(share * len(values)) - 1, 0)]
