"""The guard: the measured gain of a drafter against plain decoding, and its end where that is a loss."""

import math
from dataclasses import dataclass, field
from random import Random

from foreword.control.settings import ControlSettings
from foreword.speculation.report import StageSeconds

BLOCK = 64
LEAST_STEPS = 8
"""Request-steps of one measurement, and steps that it takes at least."""

FADING = 0.98
"""Weight of a measurement after one more."""

LEAST_BLOCKS = 20
LEAST_REFERENCE = 100
"""Measurements, and plain passes to compare with, before the guard acts."""

SLOW_CALL, SLOW_CALLS = 0.2, 4
"""Part of a step by which calls exceed their expected time, and steps in a row, from which on they have become slow:
once, a drafter may have had to read a text."""

SURE = 2.33
"""Standard errors below the line: 1% of wrong alarms in one test; tests are not independent."""


@dataclass
class MeasuredGain:
    """The time that plain decoding would have taken for the same tokens, over the time that they took.

    Of whole steps in which a pair took part: dividing the difference to a plain step among few requests would magnify
    small errors of the plain step's time.
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
        if self._steps >= BLOCK and self._spent > 0:
            self._close(self._plain / self._spent)

    def _close(self, ratio: float) -> None:
        self._weight = FADING * self._weight + 1
        self._squared_weights = FADING**2 * self._squared_weights + 1
        off = ratio - self._mean
        self._mean += off / self._weight
        self._square = FADING * self._square + off * (ratio - self._mean)
        self._plain = self._spent = 0.0
        self._steps = 0
        self.blocks += 1

    def bounds(self, errors: float = 1.96) -> tuple[float, float, float] | None:
        """Return lower bound, mean and upper bound of the ratio; None while too little was measured."""
        if self.blocks < LEAST_BLOCKS:
            return None
        variance = self._square / self._weight
        effective = self._weight**2 / self._squared_weights
        error = errors * math.sqrt(variance / max(effective - 1, 1))
        return self._mean - error, self._mean, self._mean + error


@dataclass
class PairGuard:
    """Turns off a pair with a measured loss, for longer each time."""

    gain: MeasuredGain = field(default_factory=MeasuredGain)
    trips: int = 0
    off_until: float = 0.0  # seconds of engine time

    def trip(self, settings: ControlSettings, reference_passes: int, seconds: float) -> bool:
        """Return whether the pair is significantly slower than plain decoding; then it is off for a while."""
        found = self.gain.bounds(SURE)
        if found is None or reference_passes < LEAST_REFERENCE or found[2] >= settings.guard_ratio:
            return False
        self.off_until = seconds + settings.guard_retry_seconds * 2**self.trips
        self.trips += 1
        self.gain = MeasuredGain()
        return True

    def holds(self, seconds: float) -> bool:
        return seconds < self.off_until


@dataclass
class CallWatch:
    """Notices that calls have become far slower than expected, so that everything is evaluated at once."""

    _in_a_row: int = 0

    def are_slow(self, seconds: StageSeconds, expected: float) -> bool:
        """Return whether calls are slow, after a step whose calls were expected to take this long."""
        is_slow = seconds.draft - expected > SLOW_CALL * seconds.total
        self._in_a_row = self._in_a_row + 1 if is_slow else 0
        if self._in_a_row < SLOW_CALLS:
            return False
        self._in_a_row = 0
        return True


class ReferenceWindows:
    """Short windows, at random times, in which all requests decode plainly."""

    def __init__(self, settings: ControlSettings) -> None:
        self._settings = settings
        self._random = Random(settings.seed)
        self._left = 0
        self.passes = 0  # plain passes that were measured

    def begin_step(self, share: float) -> bool:
        """Return whether the next step is plain; `share` of all steps are."""
        if self._left:
            self._left -= 1
            return True
        if self._random.random() * self._settings.reference_window < share:
            self._left = self._settings.reference_window - 1
            return True
        return False
