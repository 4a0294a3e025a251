"""The guard: compares a drafter's measured speed with plain windows, and turns it off on a loss."""

import math
from dataclasses import dataclass, field
from random import Random

from foreword.control.settings import ControlSettings

BLOCK, LEAST_STEPS, LEAST_BLOCKS, LEAST_REFERENCE = 64, 8, 20, 100
"""Request-steps per measurement and its minimum steps; measurements and plain passes needed before the guard acts."""

FADING, SURE = 0.98, 2.33
"""Decay factor per measurement; standard errors below the limit: 1% false alarms per test."""


@dataclass
class MeasuredGain:
    """Ratio of the plain decoding time of some tokens to the time they took.

    Measured over whole steps with a drafter: dividing differences among few requests would magnify errors of the
    plain time.
    """

    _plain: float = 0.0  # plain seconds of this block's tokens
    _spent: float = 0.0  # actual seconds
    _steps: int = 0  # request-steps in this block
    _weight: float = 0.0
    _mean: float = 0.0
    _square: float = 0.0
    _squared_weights: float = 0.0
    blocks: int = 0

    def add(self, plain: float, spent: float, requests: int) -> None:
        """Add one step of `requests` requests."""
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
        """Return (lower bound, mean, upper bound) of the ratio; None with too few measurements."""
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
    off_until: float = 0.0  # engine seconds

    def holds(self, settings: ControlSettings, reference_passes: int, seconds: float) -> bool:
        """Return whether the drafter is off: significantly slower than plain decoding, now or recently."""
        found = self.gain.bounds(SURE)
        if found is not None and reference_passes >= LEAST_REFERENCE and found[2] < settings.guard_ratio:
            self.off_until = seconds + settings.guard_retry_seconds * 2**self.trips
            self.trips += 1
            self.gain = MeasuredGain()
        return seconds < self.off_until


class ReferenceWindows:
    """Short windows at random times in which all requests decode without drafts."""

    def __init__(self, settings: ControlSettings) -> None:
        self._steps = settings.reference_window
        self._random = Random(0)
        self.left = 0  # remaining steps of the current window
        self.passes = 0  # measured plain passes

    def begin_step(self, share: float) -> bool:
        """Return whether the next step is plain; a fraction `share` of all steps is."""
        if self.left:
            self.left -= 1
            return True
        if self._random.random() * self._steps < share:
            self.left = self._steps - 1
            return True
        return False
