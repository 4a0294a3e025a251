"""Requests that heads are told of though they are not in use, so that they can be tried."""

from foreword.control.decisions.arms import Arm
from foreword.control.decisions.records import RequestRecord
from foreword.control.learning.probes import BESIDE, TimeBank

WATCHED = 32
WATCH_STEPS = 128
"""Of requests whose head is not in use, one in so many is told to it all the same, for so many steps in turn: telling
costs time, and a head that was told nothing cannot be tried."""

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

    def takes(self, record: RequestRecord, number: int, step: int) -> bool:
        """Whether a request is one of those."""
        # In turns where a head has to join late; where it may not, the same ones from their beginning on.
        turn = step // WATCH_STEPS if len(record.arms) == 1 else 0
        if (number + turn) % WATCHED:
            return False
        before = 0.0 if record.is_watched else BEFORE_A_PROBE * TELLING
        return any(record.may_ask(head) and self._can_try(record, head, before) for head in record.heads)

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
