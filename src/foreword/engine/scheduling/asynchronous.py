"""Whether a step may be launched before the verdicts of the pass in flight are known."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.engine.requests.request import Request
from foreword.speculation.measured.situation import Situation
from foreword.speculation.probe import FaultLog
from foreword.speculation.protocols import Policy

PLANNED_EVERY, PLANNED_SELDOM = 64, 256
"""Steps after which the policy plans one again where it wanted no drafts, and the most, to which they grow as long
as it does not: the device waits for the host before such a step, which at batch 128 takes as long as the step."""


@dataclass
class LookaheadGate:
    """A step ahead is always plain, so it waits where the policy wants drafts, and now and then to let it choose."""

    policy: Policy
    faults: FaultLog
    _in_a_row: int = 0  # steps that it could have planned and did not
    _patience: int = PLANNED_EVERY
    _planned_for: int = 0  # requests that ran then

    def may_follow(self, running: Sequence[Request], situation: Situation) -> bool:
        """Return whether requests of a pass in flight may be in the next one."""
        if not any(request.kv.passes for request in running):
            if self._in_a_row > self._patience:
                self._patience = min(2 * self._patience, PLANNED_SELDOM)
            self._in_a_row, self._planned_for = 0, len(running)
            return False
        return not situation.speculating or not self._wants_drafts(running, situation)

    def _wants_drafts(self, running: Sequence[Request], situation: Situation) -> bool:
        choosing = [request for request in running if request.speculation is not None]
        if not choosing and not self.policy.drafters():
            return False
        self._in_a_row += 1
        if self._in_a_row > self._patience or not all(request.kv.passes for request in choosing):
            return True
        if 2 * len(running) <= self._planned_for:
            return True  # with fewer requests drafts may gain
        wants = True
        with self.faults.forgiven("rows wanted"):
            wants = self.policy.rows_wanted(running, situation, beside=0) > 0
        if wants:
            self._patience = PLANNED_EVERY
        return wants
