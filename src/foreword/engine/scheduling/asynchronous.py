"""Decides whether a step may be launched before the verdicts of the pass in flight."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.engine.requests.request import Request
from foreword.speculation.measured.situation import Situation
from foreword.speculation.probe import FaultLog
from foreword.speculation.protocols import Policy

PLANNED_EVERY, PLANNED_SELDOM = 64, 256
"""Steps between two plans while the policy wants no drafts: the initial interval, and the maximum to which it grows.

Before a planned step the device waits for the host, which at batch 128 takes as long as a step.
"""


@dataclass
class LookaheadGate:
    """Allows a step before the verdicts of the pass in flight, unless the policy wants drafts or a plan is due.

    A step that is launched before these verdicts has neither a plan nor drafts.
    """

    policy: Policy
    faults: FaultLog
    _steps_without_plan: int = 0  # since the last plan
    _interval: int = PLANNED_EVERY  # maximum of `_steps_without_plan`
    _planned_for: int = 0  # number of running requests at the last plan

    def may_follow(self, running: Sequence[Request], situation: Situation) -> bool:
        """Return whether requests of the pass in flight may be in the next pass; count the steps since a plan.

        Without a pass in flight the next step is planned, which begins a new interval.
        """
        if not any(request.kv.passes for request in running):
            if self._steps_without_plan > self._interval:
                self._interval = min(2 * self._interval, PLANNED_SELDOM)
            self._steps_without_plan, self._planned_for = 0, len(running)
            return False
        return not situation.speculating or not self._wants_plan(running, situation)

    def _wants_plan(self, running: Sequence[Request], situation: Situation) -> bool:
        """Return whether the next step should be planned: a plan is due, or the policy wants drafts."""
        with_drafter = [request for request in running if request.speculation is not None]
        if not with_drafter and not self.policy.drafters():
            return False
        self._steps_without_plan += 1
        if self._steps_without_plan > self._interval or not all(
            request.kv.passes for request in with_drafter
        ):
            return True
        if 2 * len(running) <= self._planned_for:
            return True  # with fewer requests drafts gain more
        wants = True
        with self.faults.suppressed("rows wanted"):
            wants = self.policy.rows_wanted(running, situation, beside=0) > 0
        if wants:
            self._interval = PLANNED_EVERY
        return wants
