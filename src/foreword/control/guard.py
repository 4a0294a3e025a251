"""The guard: the measured gain of a drafter against plain windows, and its end where that is a loss."""

import math
from dataclasses import dataclass, field
from random import Random

from foreword.control.settings import ControlSettings

BLOCK, LEAST_STEPS, LEAST_BLOCKS, LEAST_REFERENCE = 64, 8, 20, 100
"""Request-steps of one measurement and steps that it takes at least; measurements, and plain passes to compare with,
before the guard acts."""

FADING, SURE = 0.98, 2.33
"""Weight of a measurement after one more; standard errors below the line: 1% of wrong alarms in one test."""


@dataclass
class MeasuredGain:
    """The time that plain decoding would have taken for the same tokens, over the time that they took.

    Of whole steps in which a drafter took part: dividing the difference to a plain step among few requests would
    magnify small errors of the plain step's time.
    """

    _plain: float = 0.0  # seconds that the tokens of this block would have taken plainly
    _spent: float = 0.0  # seconds that they took
    _steps: int = 0  # request-steps of this block
    _weight: float = 0.0
    _mean: float = 0.0
    _square: float = 0.0
    _squared_weights: float = 0.0
    blocks: int = 0

    def add(self, plain: float, spent: float, requests: int) -> None:
        """Add one step for so many requests."""
        self._plain += plain
        self._spent += spent
        self._steps += min(requests, BLOCK // LEAST_STEPS)
        if self._steps < BLOCK or self._spent <= 0:
            return
        ratio = self._plain / self._spent
        self._weight = FADING * self._weight + 1
        self._squared_weights = FADING**2 * self._squared_weights + 1
        off = ratio - self._mean
        self._mean += off / self._weight
        self._square = FADING * self._square + off * (ratio - self._mean)
        self._plain, self._spent, self._steps = 0.0, 0.0, 0
        self.blocks += 1

    def bounds(self, errors: float = 1.96) -> tuple[float, float, float] | None:
        """Return lower bound, mean and upper bound of the ratio; None while too little was measured."""
        if self.blocks < LEAST_BLOCKS:
            return None
        effective = self._weight**2 / self._squared_weights
        error = errors * math.sqrt(self._square / self._weight / max(effective - 1, 1))
        return self._mean - error, self._mean, self._mean + error


@dataclass
class Guard:
    """Turns off a drafter with a measured loss, for longer each time."""

    gain: MeasuredGain = field(default_factory=MeasuredGain)
    trips: int = 0
    off_until: float = 0.0  # seconds of engine time

    def holds(self, settings: ControlSettings, reference_passes: int, seconds: float) -> bool:
        """Return whether the drafter is off: significantly slower than plain decoding now, or a while ago."""
        found = self.gain.bounds(SURE)
        if found is not None and reference_passes >= LEAST_REFERENCE and found[2] < settings.guard_ratio:
            self.off_until = seconds + settings.guard_retry_seconds * 2**self.trips
            self.trips += 1
            self.gain = MeasuredGain()
        return seconds < self.off_until


class ReferenceWindows:
    """Short windows, at random times, in which all requests decode plainly."""

    def __init__(self, settings: ControlSettings) -> None:
        self._steps = settings.reference_window
        self._random = Random(0)
        self.left = 0  # steps of the present window
        self.passes = 0  # plain passes that were measured

    def begin_step(self, share: float) -> bool:
        """Return whether the next step is plain; `share` of all steps are."""
        if self.left:
            self.left -= 1
            return True
        if self._random.random() * self._steps < share:
            self.left = self._steps - 1
            return True
        return False
