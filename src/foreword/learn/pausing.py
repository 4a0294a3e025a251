"""Decides when a training on the engine's device runs: in idle time, and for a small share of busy time."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


class TrainerProcess(Protocol):
    """A running training."""

    def poll(self) -> int | None:
        """Return the exit code; None: it has not ended."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def kill(self) -> None:
        """End it, also while it is paused."""

    def wait(self) -> None:
        """Wait for its end."""


@dataclass
class Pauses:
    """Pauses a process while the engine is busy. A token bucket gives it a share of busy time."""

    process: TrainerProcess
    clock: Callable[[], float]  # seconds
    share: float  # fraction of busy time
    resume_after: float  # seconds of idle time
    slice_seconds: float  # length of a turn in busy time
    is_shared: bool = True  # False: another device, on which it runs always
    is_paused: bool = False
    run_seconds: float = 0.0  # time in which it was not paused
    busy_seconds: float = 0.0  # the part of it in which requests were running
    _credit: float = 0.0  # seconds that it may run in busy time
    _idle_since: float | None = None
    _was_busy: bool = False
    _now: float = field(init=False)

    def __post_init__(self) -> None:
        self._now = self.clock()

    def busy(self) -> None:
        """Pause when requests begin to run; resume for a slice whenever the share allows one."""
        passed = self._account(is_busy=True)
        self._idle_since = None
        if not self.is_shared:
            return
        gained = self.share * passed - (0.0 if self.is_paused else passed)
        self._credit = min(self._credit + gained, self.slice_seconds)
        if not self.is_paused and self._credit <= 0:
            self._pause()
        elif self.is_paused and self._credit >= self.slice_seconds:
            self._resume()

    def idle(self) -> None:
        """Resume when the engine has been idle for long enough."""
        self._account(is_busy=False)
        if self._idle_since is None:
            self._idle_since = self._now
        if self.is_paused and self._now - self._idle_since >= self.resume_after:
            self._credit = 0.0  # the next requests pause it at once
            self._resume()

    def _account(self, is_busy: bool) -> float:
        """Add the time since the last call; return the part of it in which requests were running."""
        now = self.clock()
        passed, self._now = now - self._now, now
        busy = passed if self._was_busy else 0.0
        self._was_busy = is_busy
        if not self.is_paused:
            self.run_seconds += passed
            self.busy_seconds += busy
        return busy

    def _pause(self) -> None:
        self.is_paused = True
        self.process.pause()

    def _resume(self) -> None:
        self.is_paused = False
        self.process.resume()
