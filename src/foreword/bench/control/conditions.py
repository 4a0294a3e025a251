"""What happens when things change in the middle of a run."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from foreword.bench.control.cells import PLAIN
from foreword.bench.control.timeline import (
    Line,
    Phase,
    Step,
    decoding,
    reaction_seconds,
    settled_rate,
    worst_stretch,
)
from foreword.bench.control.windows import Arm
from foreword.progress import StageProgress

LEAST_WORST = 0.9
"""Of plain decoding, in the five seconds that go worst."""

OFF_WITHIN, ON_WITHIN = 3.0, 10.0
"""Seconds after a change until guesses that have stopped to pay are left off, and until they are made again."""


@dataclass(frozen=True)
class Condition:
    """A change and, where it goes away again, its end."""

    name: str
    phases: Mapping[str, Phase]  # by what has happened


@dataclass(frozen=True)
class Reaction:
    """How the controller took a change."""

    condition: str
    phase: str
    seconds: (
        float  # until the rate was near where it settled, or near plain decoding where guesses may not pay
    )
    within: float  # seconds that it should take at most
    ratio: float  # of the rate where it settled, to plain decoding in the same circumstances
    worst: float  # the same of the worst five seconds


@dataclass(frozen=True)
class Circumstances:
    """What can be done to an engine."""

    slow_drafter: Callable[[], AbstractContextManager[object]]
    busy_core: Callable[[], AbstractContextManager[object]]


def conditions(good: str, bad: str, most_batch: int, seconds: float, can: Circumstances) -> list[Condition]:
    """Guesses pay for texts of the `good` kind, and hardly for those of the `bad` one."""
    alone = Phase(good, 1, seconds)
    return [
        Condition(
            "texts of another kind",
            {"before": alone, "changed": Phase(bad, 1, seconds), "back": alone},
        ),
        Condition(
            "drafter ten times as slow",
            {"before": alone, "slow": Phase(good, 1, seconds, can.slow_drafter), "back": alone},
        ),
        Condition(
            "another process takes a core",
            {"before": alone, "busy": Phase(good, 1, seconds, can.busy_core), "back": alone},
        ),
        Condition(
            "batch grows",
            {"one": alone, f"{most_batch}": Phase(good, most_batch, 2 * seconds), "one again": alone},
        ),
    ]


def measure_conditions(
    line: Line, changes: Sequence[Condition], controller: Arm, on_progress: StageProgress
) -> list[Reaction]:
    """Every change twice: decoding plainly, to compare with, and as the controller likes."""
    found = []
    for place, change in enumerate(changes):
        on_progress(change.name, place, len(changes))
        phases = list(change.phases.values())
        plain, own = line.run(PLAIN, phases), line.run(controller, phases)
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
