"""Drafters that are not in use are tried now and then, so that it is known when they would pay."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from foreword.control.decisions.arms import Arm, PairControl
from foreword.control.decisions.asking import Pass
from foreword.control.decisions.records import RequestRecord
from foreword.control.learning.probes import BESIDE, BESIDE_EACH, MOST_PROBES, TimeBank
from foreword.speculation.requests import DraftPlan

Records = Sequence[RequestRecord | None]


@dataclass
class Explorer:
    """Spends what the bank has earned, at one step."""

    bank: TimeBank
    step: int
    seconds: float  # of engine time
    affordable: set[PairControl]  # those that the bank may still pay for
    live: tuple[str, float] | None = None  # whose guesses are verified as a try, and what was paid for it
    _expected: dict[str, float] = field(default_factory=dict)  # by drafter, what this step's probes will take

    def explore(self, records: Records, plans: list[DraftPlan | None], here: Pass) -> None:
        """Try drafters that are not in use, as long as the bank pays: for one request, or for all of a cohort.

        A try is verified as well. That is the cheaper way to learn of drafters that are dear, or nearly pay.
        """
        self._expected = {plan.method: 0.0 for plan in plans if plan is not None and plan.max_nodes}
        probes = 0
        for offset in range(len(records)):
            place = (self.step + offset) % len(records)
            record = records[place]
            if record is None:
                continue
            for arm in self._in_turn(record, len(records)):
                plan, control, may_use = plans[place], arm.control, arm.plan.allows(len(records))
                if plan is not None and plan.max_nodes and arm.is_lookup:
                    price = self._price(record, arm, 0.0)
                    if price is not None:
                        self.bank.pay(arm.plan.method, price)
                        plans[place] = replace(plan, aside=record.ask_aside(arm, control.probe_depth))
                        probes += 1
                        break
                    continue
                lost = 0.0  # a pass without the guesses that it would have had is part of the price
                if record.asked is not None:
                    lost = max(record.asked.control.worth.saved, 0.0) * here.per_token
                if not lost and may_use and control.live_loss(self.seconds) < control.probe_pass:
                    if self._try_live(control, records, plans):
                        return
                elif self._price(record, arm, lost) is not None:
                    plans[place] = record.ask(
                        arm, control.varied(control.probe_depth, self.step), is_probe=True
                    )
                    probes += 1
                    break
            if probes == MOST_PROBES or not self.affordable:
                return

    def _in_turn(self, record: RequestRecord, running: int) -> Iterator[Arm]:
        """The drafters that may be tried for a request, another one first from time to time."""
        arms = record.arms
        for turn in range(len(arms)):
            arm = arms[(self.step // running + turn) % len(arms)]
            if arm.control not in self.affordable:
                continue
            if record.waiting and record.waits_for(arm):
                continue
            is_deaf = not record.may_ask(arm) or (arm.reading is not None and not record.was_told)
            if arm is record.asked or not arm.plan.may_be_tried or is_deaf:
                continue
            yield arm

    def _price(self, record: RequestRecord, arm: Arm, lost: float) -> float | None:
        """Of one more probe of a drafter; None if the bank does not pay for it. What is lost by it is paid at once."""
        method, control = arm.plan.method, arm.control
        before = self._expected.get(method)
        price = control.probe_seconds if before is None else control.probe_more
        at_once = lost + (0.0 if self._expected else BESIDE)  # in a pass with guesses the host does it anyway
        if not self.bank.affords(method, price + (before or 0.0) + at_once):
            if control.live_loss(self.seconds) >= control.probe_pass:
                self.affordable.discard(control)  # nor is it tried for any other request of this step
            return None
        price += control.probe_behind * arm.behind(record.length)
        expected = price + (before or 0.0)
        if not self.bank.affords(method, expected + at_once):
            return None
        if at_once:
            self.bank.pay(method, at_once)  # the draft itself is paid for when it is known what it took
        self._expected[method] = expected + BESIDE_EACH
        return price

    def _try_live(self, control: PairControl, records: Records, plans: list[DraftPlan | None]) -> bool:
        """Ask for all requests of a cohort that nobody else is asked for; False if the bank does not pay for it."""
        found = [
            (place, record, arm)
            for place, record in enumerate(records)
            if record is not None and record.asked is None
            for arm in record.arms
            if arm.control is control
            and arm.plan.allows(len(records))
            and (record.was_told or arm.reading is None)
        ]
        loss, method = BESIDE + control.live_loss(self.seconds), control.estimate.method
        # A lookup that was not asked of late has whole texts to read first.
        loss += control.probe_behind * sum(arm.behind(record.length) for _, record, arm in found)
        if not found or not self.bank.affords(method, loss):
            return False
        self.bank.pay(method, loss)
        self.live = method, loss
        for place, record, arm in found:
            plans[place] = record.ask(arm, control.worth.depth if record.is_coupled else control.worth.kept)
            # It is verified though it does not seem to pay: that is what was paid for.
            record.trial_depth = control.worth.kept
        return True
