"""Asynchronous scheduling: steps in flight, so that a device need not wait for the host."""

from collections import deque

from foreword.engine.core import EngineCore
from foreword.engine.messages import AnswerDelta
from foreword.speculation.recovery import StepInFlight


class StepPipeline:
    """Runs an engine's steps, the next one launched before the last has been resolved where that is possible."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._in_flight: deque[StepInFlight] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._in_flight)

    def advance(self) -> list[AnswerDelta]:
        """Launch what can be launched and resolve the oldest step; returns what the answers have gained.

        A device gets its next step before the last one is accounted for.
        """
        core, late = self._core, self._core.end_late()
        self._fill()
        if not self._in_flight:
            core.wait_for_masks()
            return late
        report = core.commit(self._in_flight.popleft())
        if core.steps_ahead > 1:
            self._fill()
        return [*late, *core.settle(report)]

    def _fill(self) -> None:
        in_flight, core = self._in_flight, self._core
        while len(in_flight) < core.steps_ahead and (launched := core.launch()) is not None:
            in_flight.append(launched)
