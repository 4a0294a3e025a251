"""Requests that heads are told of though they are not in use, so that they can be tried."""

from foreword.control.decisions.arms import Arm
from foreword.control.decisions.records import RequestRecord
from foreword.control.learning.probes import BESIDE, TimeBank

WATCH_STEPS, LEAST_STEPS = 128, 32
"""Of requests whose head is not in use one at a time is told to it all the same, where it can join late for so many
steps, and another one not before so many: telling costs time, and a head that was told nothing cannot be tried."""

TELLING = 3e-4
"""Seconds that telling a head of one more request takes in a step: states are kept, copied and handed over."""

BEFORE_A_PROBE = 4
"""Steps that a head is told of before it can be tried, at least: it is looked at in every few."""


class Watch:
    """Telling is paid from the account that pays for probes, and lasts as long as that has the price of one.

    Told of every step, a head whose probes are seldom affordable would cost far more by being told than by being tried.
    """

    def __init__(self, bank: TimeBank) -> None:
        self._bank = bank
        self._told: list[RequestRecord] = []  # requests whose heads are told of them without being in use
        self._watched: RequestRecord | None = None  # the one that is to be tried
        self._since = self._seen = -LEAST_STEPS  # steps, when its turn began and when it was last there

    def takes(self, record: RequestRecord, step: int) -> bool:
        """Whether a request is the one."""
        if record is not self._watched and not self._is_free(step):
            return False
        if record is self._watched:
            self._seen = step
        before = 0.0 if record.is_watched else BEFORE_A_PROBE * TELLING
        idle = [head for head in record.heads if not head.control.in_use and record.may_ask(head)]
        can_try = any(self._can_try(record, head, before) for head in idle)
        if can_try and record is not self._watched:
            self._watched, self._since, self._seen = record, step, step
        elif not can_try and record is self._watched:
            self._watched = None
        return can_try

    def _is_free(self, step: int) -> bool:
        """Whether another one may be watched: none is, or it is gone, or had its turn.

        Where a head may not join late, one that is given up can never be watched again: it goes on.
        """
        watched, steps = self._watched, step - self._since
        if watched is None or watched.request() is None or step - self._seen > 2 * WATCH_STEPS:
            return steps >= LEAST_STEPS
        return len(watched.arms) == 1 and steps >= WATCH_STEPS

    def begin_pass(self) -> None:
        """Whoever is told is planned anew."""
        self._told = []

    def tells(self, record: RequestRecord) -> bool:
        """Whether heads are told of this request, in this pass and those like it."""
        has_head = record.has_head_in_use
        if record.is_watched and not has_head:
            self._told.append(record)
        return record.is_watched or has_head

    def pay(self) -> bool:
        """For one pass; False when some head cannot be tried any more, so that it is to be looked who is told."""
        can_try = True
        for record in self._told:
            for head in record.heads:
                self._bank.pay_telling(head.plan.method, TELLING)
                can_try = can_try and self._can_try(record, head, 0.0)
        return can_try

    def _can_try(self, record: RequestRecord, head: Arm, before: float) -> bool:
        control = head.control
        behind = control.probe_behind * head.behind(record.length)
        return self._bank.affords(head.plan.method, control.probe_pass + behind + BESIDE + before)
