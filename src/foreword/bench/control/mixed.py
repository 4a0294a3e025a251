"""What guesses for others cost those who decode plainly."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from foreword.bench.control.cells import PLAIN
from foreword.bench.control.timeline import Line, Phase, Step
from foreword.bench.control.windows import MIXED, Arm

MOST_RATIO = 1.05


@dataclass(frozen=True)
class MixedTraffic:
    """Time per token of plain requests, alone and where the other half speculates."""

    batch: int
    plain_ms: float  # 95th percentile of an all-plain run
    mixed_ms: float  # of the plain requests in a mixed one

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
    plain: list[float] = []
    mixed: list[float] = []
    for _ in range(turns):
        plain += _waits(line.run(PLAIN, [phase])[0])
        mixed += _waits(line.run(half, [phase])[0])
    return MixedTraffic(batch, 1e3 * percentile(plain, 0.95), 1e3 * percentile(mixed, 0.95))


def _waits(steps: Sequence[Step]) -> list[float]:
    return [seconds for step in steps for seconds in step.plain_seconds]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of them does not exceed."""
    return sorted(values)[max(ceil(share * len(values)) - 1, 0)]
