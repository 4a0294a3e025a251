"""Asynchronous scheduling: keeps steps in flight, so that the device does not wait for the host."""

from collections import deque

from foreword.engine.core import EngineCore
from foreword.engine.messages import AnswerDelta
from foreword.speculation.recovery import StepInFlight


class StepPipeline:
    """Runs an engine's steps; with asynchronous scheduling the next one is launched before the previous is resolved."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._in_flight: deque[StepInFlight] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._in_flight)

    def advance(self) -> list[AnswerDelta]:
        """Launch the steps that can be launched and resolve the oldest; return the new deltas.

        Deltas of answers that ended at their deadline come first. With asynchronous scheduling, the device gets its
        next step before statistics of the previous one are updated.
        """
        core, ended = self._core, self._core.end_late()
        self._fill()
        if not self._in_flight:
            core.wait_for_masks()
            return ended
        report = core.commit(self._in_flight.popleft())
        if core.steps_ahead > 1:
            self._fill()
        return [*ended, *core.settle(report)]

    def _fill(self) -> None:
        """Launch steps until `steps_ahead` are in flight or nothing can be launched."""
        in_flight, core = self._in_flight, self._core
        while len(in_flight) < core.steps_ahead and (launched := core.launch()) is not None:
            in_flight.append(launched)
