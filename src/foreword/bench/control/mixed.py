"""What guesses for others cost those who decode plainly."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean

from foreword.bench.control.cells import PLAIN
from foreword.bench.control.timeline import Line, Phase, Step
from foreword.bench.control.windows import MIXED, Arm

MOST_RATIO = 1.05


@dataclass(frozen=True)
class MixedTraffic:
    """Time per token of requests, in an all-plain run and where half of them speculate.

    Of whole answers: one step that is longer for others' guesses is made up for by those around it.
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


def measure_mixed(line: Line, controller: Arm, batch: int, seconds: float, turns: int = 3) -> MixedTraffic:
    """Plain and mixed runs in turns."""
    half = Arm(controller.label, controller.setting, is_half=True)
    phase = Phase(MIXED, batch, seconds / turns)
    alone: list[Step] = []
    together: list[Step] = []
    for _ in range(turns):
        alone += line.run(PLAIN, [phase])[0]
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
