"""Clocks that no machine turns: what an engine decides by measured time is then the same everywhere."""

from dataclasses import dataclass


@dataclass
class ScriptedClock:
    """Goes on by `tick` seconds whenever it is looked at, and as it is told."""

    now: float = 0.0
    tick: float = 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
