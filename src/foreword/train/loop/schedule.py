"""How long a stretch of training lasts, and its learning rate."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Stretch:
    """A constant rate, so that stretches add up; the final one ends with a decay."""

    seconds: float | None = None
    last_step: int | None = None
    final: bool = False
    decay_share: float = 0.4  # of the stretch
    clock: Callable[[], float] = time.monotonic
    first_step: int = 0
    stop: Callable[[], bool] = lambda: False  # whether to end early, before the next step
    _begin: float = field(init=False)

    def __post_init__(self) -> None:
        self._begin = self.clock()

    def is_over(self, step: int) -> bool:
        return self.stop() or self.done(step) >= 1.0

    def rate(self, step: int) -> float:
        """Factor on the learning rate of the next step."""
        if not self.final:
            return 1.0
        return max(0.02, min(1.0, (1.0 - self.done(step)) / self.decay_share))

    def done(self, step: int) -> float:
        """Share of the stretch that is over, by whichever limit is closer."""
        shares = [0.0]
        if self.seconds is not None:
            shares.append((self.clock() - self._begin) / max(self.seconds, 1e-9))
        if self.last_step is not None:
            length = self.last_step - self.first_step
            shares.append((step - self.first_step) / length if length > 0 else 1.0)
        return max(shares)
