"""Whether steps may be laid out ahead of what the passes under way will tell."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.engine.requests.request import Request
from foreword.speculation.faults import FaultLog
from foreword.speculation.measured.situation import Situation
from foreword.speculation.protocols import Policy

PLANNED_EVERY = 64
"""Steps after which the policy is asked again whether to guess, where it did not want to."""


@dataclass
class Lookout:
    """A step ahead is always plain, so it waits where the policy wants guesses, and now and then to let it choose."""

    policy: Policy
    faults: FaultLog
    _in_a_row: int = 0

    def may_follow(self, running: Sequence[Request], situation: Situation) -> bool:
        """Whether requests of a pass under way may be in the next one."""
        if not any(request.kv.passes for request in running):
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        return not situation.speculating or not self._is_to_guess(running, situation)

    def _is_to_guess(self, running: Sequence[Request], situation: Situation) -> bool:
        choosing = [request for request in running if request.speculation is not None]
        if not choosing and not self.policy.drafters():
            return False
        if self._in_a_row > PLANNED_EVERY or not all(request.kv.passes for request in choosing):
            return True
        with self.faults.forgiven("rows wanted"):
            return self.policy.rows_wanted(running, situation, beside=0) > 0
        return True
