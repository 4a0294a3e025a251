"""The time that may be spent on guesses that are only compared with the text."""

from dataclasses import dataclass

MOST_SAVED = 0.03
"""Seconds that the bank keeps at most, or the price of two probes if that is more."""

START = 0.03
"""Seconds to begin with, so that a first request is not over before anything was tried."""


@dataclass
class TimeBank:
    """Earns a share of the time of all steps, and pays for probes. What they cost is never more than that."""

    balance: float = START
    spent: float = 0.0
    earned_from: float = 0.0  # seconds of steps
    _dearest: float = 0.0

    def earn(self, step_seconds: float, share: float) -> None:
        self.earned_from += step_seconds
        most = max(MOST_SAVED, 2 * self._dearest)
        self.balance = min(self.balance + share * step_seconds, most)

    def pay(self, seconds: float) -> None:
        """A probe was dearer than expected: the next one waits the longer."""
        self.balance -= seconds
        self.spent += seconds
        self._dearest = max(0.98 * self._dearest, seconds)

    def affords(self, seconds: float) -> bool:
        return self.balance >= seconds

    @property
    def share(self) -> float:
        """Of the time of all steps, what was spent."""
        return self.spent / self.earned_from if self.earned_from else 0.0
