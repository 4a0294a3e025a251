"""The guard: compares a drafter's measured speed with plain windows, and turns it off on a loss."""

import math
from dataclasses import dataclass, field
from random import Random

from foreword.control.settings import DEFAULTS, ControlSettings

BLOCK, LEAST_BLOCKS, LEAST_REFERENCE, FADING = 64, 20, 100, 0.98
"""Request-steps per measurement; measurements and plain passes needed before the guard acts; decay per measurement."""


@dataclass
class MeasuredGain:
    """Ratio of the plain decoding time of some tokens to the time they took.

    Measured over whole steps with a drafter: dividing differences among few requests would magnify errors of the
    plain time.
    """

    blocks: int = 0
    _open: tuple[float, float, int] = (
        0.0,
        0.0,
        0,
    )  # plain seconds, actual seconds and request-steps since a block
    # Decayed sums over the blocks: of weights, of squared weights, and of squared deviations; and the mean.
    _weight: float = 0.0
    _squared_weights: float = 0.0
    _square: float = 0.0
    _mean: float = 0.0

    def add(self, plain: float, spent: float, requests: int) -> None:
        """Add one step of `requests` requests; a block has at least eight steps."""
        plain, spent, steps = (
            self._open[0] + plain,
            self._open[1] + spent,
            self._open[2] + min(requests, BLOCK // 8),
        )
        self._open = plain, spent, steps
        if steps < BLOCK or spent <= 0:
            return
        self._open = 0.0, 0.0, 0
        self.blocks += 1
        self._weight = FADING * self._weight + 1
        self._squared_weights = FADING**2 * self._squared_weights + 1
        off = plain / spent - self._mean
        self._mean += off / self._weight
        self._square = FADING * self._square + off * (plain / spent - self._mean)

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
        found = self.gain.bounds(settings.guard_errors)
        if found is not None and reference_passes >= LEAST_REFERENCE and found[2] < settings.guard_ratio:
            self.off_until = seconds + settings.guard_retry_seconds * 2**self.trips
            self.trips += 1
            self.gain = MeasuredGain()
        return seconds < self.off_until


class ReferenceWindows:
    """Short windows at random times in which all requests decode without drafts."""

    def __init__(self) -> None:
        self._random = Random(0)
        self.left = 0  # remaining steps of the current window
        self.passes = 0  # measured plain passes

    def begin_step(self, share: float) -> bool:
        """Return whether the next step is plain; a fraction `share` of all steps is."""
        if self.left:
            self.left -= 1
        elif self._random.random() * DEFAULTS.reference_window < share:
            self.left = DEFAULTS.reference_window - 1
        else:
            return False
        return True
