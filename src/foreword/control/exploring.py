"""Drafters that are not in use are tried now and then, so that it is known when they would pay."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.control.arms import PairControl, RequestRecord
from foreword.control.asking import Pass
from foreword.control.probes import TimeBank
from foreword.speculation.requests import DraftPlan

MOST_PROBES = 8
"""Of one step."""


@dataclass(frozen=True)
class Explorer:
    """Spends what the bank has earned, at one step."""

    bank: TimeBank
    step: int
    seconds: float  # of engine time

    def explore(
        self, records: Sequence[RequestRecord | None], plans: list[DraftPlan | None], here: Pass
    ) -> None:
        """Try drafters that are not in use, as long as the bank pays: for one request, or for all of a cohort.

        A try is verified as well. That is the cheaper way to learn of drafters that are dear, or nearly pay.
        """
        price, probes = 0.0, 0
        for offset in range(len(records)):
            place = (self.step + offset) % len(records)
            record = records[place]
            if record is None or len(record.waiting) > 1 or (record.has_heads and not record.was_told):
                continue
            arm = record.arms[(self.step // len(records)) % len(record.arms)]
            may_use = arm.plan.allows(len(records))  # one in the shadow is only compared
            is_unlucky = may_use and arm.control.is_on and not arm.pays
            if arm is record.asked or not arm.plan.may_be_tried or (is_unlucky and len(record.arms) == 1):
                continue
            control = arm.control
            lost = 0.0  # a pass without the guesses that it would have had is part of the price
            if record.asked is not None:
                lost = max(record.asked.control.worth.saved, 0.0) * here.per_token
            is_cheap = control.live_loss(self.seconds) < control.probe_seconds
            if not lost and is_cheap and may_use:
                if self._try_live(control, records, plans):
                    return
                continue
            price += lost + control.probe_seconds
            if not self.bank.affords(price) or probes == MOST_PROBES:
                return
            self.bank.pay(lost)  # the draft itself is paid for when it is known what it took
            price -= lost
            plans[place] = record.ask(arm, control.varied(control.probe_depth, self.step), is_probe=True)
            probes += 1

    def _try_live(
        self,
        control: PairControl,
        records: Sequence[RequestRecord | None],
        plans: list[DraftPlan | None],
    ) -> bool:
        """Ask for all requests of a cohort that nobody else is asked for; False if the bank does not pay for it."""
        found = [
            (place, record, arm)
            for place, record in enumerate(records)
            if record is not None and record.asked is None and (record.was_told or not record.has_heads)
            for arm in record.arms
            if arm.control is control and arm.plan.allows(len(records))
        ]
        loss = control.live_loss(self.seconds)
        if not found or not self.bank.affords(loss):
            return False
        self.bank.pay(loss)
        for place, record, arm in found:
            plans[place] = record.ask(arm, control.worth.depth if record.is_coupled else control.worth.kept)
            # It is verified though it does not seem to pay: that is what was paid for.
            record.trial_depth = control.worth.kept
        return True
