"""Clocks that a test turns by hand. What an engine decides by measured time is then the same on any machine."""

from dataclasses import dataclass


@dataclass
class ScriptedClock:
    """Stands still until it is told otherwise."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
