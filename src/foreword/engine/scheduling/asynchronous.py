"""Decides whether a step may be launched before the verdicts of the pass in flight."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.engine.requests.request import Request
from foreword.speculation.measured.situation import Situation
from foreword.speculation.probe import FaultLog
from foreword.speculation.protocols import Policy

PLANNED_EVERY, PLANNED_SELDOM = 64, 256
"""Steps between two plans while the policy wants no drafts: initial interval, and the maximum to which it grows.

Before a planned step the device waits for the host. At batch 128 this wait is as long as a step.
"""


@dataclass
class LookaheadGate:
    """Allows a step before the verdicts of the pass in flight, unless the policy wants drafts or a plan is due.

    Such a step has no drafts.
    """

    policy: Policy
    faults: FaultLog
    _in_a_row: int = 0  # consecutive steps launched without a plan
    _patience: int = PLANNED_EVERY
    _planned_for: int = 0  # number of running requests at the last plan

    def may_follow(self, running: Sequence[Request], situation: Situation) -> bool:
        """Return whether requests of the pass in flight may be in the next pass."""
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
        with self.faults.suppressed("rows wanted"):
            wants = self.policy.rows_wanted(running, situation, beside=0) > 0
        if wants:
            self._patience = PLANNED_EVERY
        return wants
