"""Exploration: drafters that are not in use are tried now and then, within a budget of time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from foreword.control.budget import HOST_OBSERVE, HOST_PASS, HOST_REQUEST, MOST_PROBES, ExplorationBudget
from foreword.control.pairs import PairControl
from foreword.control.records import Arm, RequestRecord
from foreword.control.value import Pass
from foreword.speculation.requests import DraftPlan

Records = Sequence[RequestRecord | None]

WATCH_STEPS, LEAST_STEPS, BEFORE_A_PROBE = 128, 32, 4
"""Steps that a head observes one request to be tried, that pass before the next one, and before it can be tried."""


@dataclass
class Explorer:
    """Spends the budget in one step."""

    budget: ExplorationBudget
    step: int
    seconds: float  # of engine time
    affordable: set[PairControl]  # those that the budget may still pay for
    live: tuple[str, float] | None = None  # the drafter of a verified try, and what was paid for it
    _expected: dict[str, float] = field(default_factory=dict)  # by drafter, the time of this step's tries

    def explore(self, records: Records, plans: list[DraftPlan | None], here: Pass) -> None:
        """Try drafters that are not in use, for one request, or for all of a cohort.

        A try is verified where that is cheaper: for drafters that are expensive, or nearly have a gain.
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
                        self.budget.pay(arm.plan.method, price)
                        plans[place] = replace(plan, shadow=record.ask_aside(arm, control.probe_depth))
                        probes += 1
                        break
                    continue
                lost = 0.0  # a pass without the draft that it would have had is part of the cost
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
        """Yield the drafters that may be tried for a request, another one first from time to time."""
        arms = record.arms
        for turn in range(len(arms)):
            arm = arms[(self.step // running + turn) % len(arms)]
            if arm.control not in self.affordable:
                continue
            if record.waiting and record.waits_for(arm):
                continue
            is_blind = not record.may_ask(arm) or (arm.reading is not None and not record.was_observed)
            if arm is record.asked or not arm.plan.may_be_tried or is_blind:
                continue
            yield arm

    def _price(self, record: RequestRecord, arm: Arm, lost: float) -> float | None:
        """Return the cost of one more try, and pay what is lost by it; None if the budget does not allow it."""
        method, control = arm.plan.method, arm.control
        before = self._expected.get(method)
        price = control.probe_seconds if before is None else control.probe_more
        at_once = lost + (
            0.0 if self._expected else HOST_PASS
        )  # in a pass with drafts the host does it anyway
        if not self.budget.affords(method, price + (before or 0.0) + at_once):
            if control.live_loss(self.seconds) >= control.probe_pass:
                self.affordable.discard(control)  # nor is it tried for any other request of this step
            return None
        price += control.probe_behind * arm.lag(record.length)
        expected = price + (before or 0.0)
        if not self.budget.affords(method, expected + at_once):
            return None
        if at_once:
            self.budget.pay(method, at_once)  # the draft itself is paid for when its time is known
        self._expected[method] = expected + HOST_REQUEST
        return price

    def _try_live(self, control: PairControl, records: Records, plans: list[DraftPlan | None]) -> bool:
        """Draft and verify for all requests of a cohort without a draft; return whether the budget allows it."""
        found = [
            (place, record, arm)
            for place, record in enumerate(records)
            if record is not None and record.asked is None
            for arm in record.arms
            if arm.control is control
            and arm.plan.allows(len(records))
            and (record.was_observed or arm.reading is None)
        ]
        loss, method = HOST_PASS + control.live_loss(self.seconds), control.estimate.method
        # A lookup that was not called recently has whole texts to read first.
        loss += control.probe_behind * sum(arm.lag(record.length) for _, record, arm in found)
        if not found or not self.budget.affords(method, loss):
            return False
        self.budget.pay(method, loss)
        self.live = method, loss
        for place, record, arm in found:
            plans[place] = record.ask(arm, control.worth.depth if record.is_coupled else control.worth.kept)
            # It is verified without an expected gain: that is what was paid for.
            record.trial_depth = control.worth.kept
        return True


class Watch:
    """Requests that heads observe without being in use, one at a time, as long as the budget has the cost of a try.

    Observing every step, a head that can seldom be tried would cost far more by observing than by being tried.
    """

    def __init__(self, budget: ExplorationBudget) -> None:
        self._budget = budget
        self._observed: list[RequestRecord] = []  # requests that heads observe without being in use
        self._watched: RequestRecord | None = None  # the one that is to be tried
        self._since = self._seen = -LEAST_STEPS  # steps, when its turn began and when it was last there

    def takes(self, record: RequestRecord, step: int) -> bool:
        """Return whether a request is the one to be tried."""
        if record is not self._watched and not self._is_free(step):
            return False
        if record is self._watched:
            self._seen = step
        before = 0.0 if record.is_watched else BEFORE_A_PROBE * HOST_OBSERVE
        idle = [head for head in record.heads if not head.control.in_use and record.may_ask(head)]
        can_try = any(self._can_try(record, head, before) for head in idle)
        if can_try and record is not self._watched:
            self._watched, self._since, self._seen = record, step, step
        elif not can_try and record is self._watched:
            self._watched = None
        return can_try

    def _is_free(self, step: int) -> bool:
        """Return whether another request may be watched: none is, or it has ended, or had its turn.

        Where a head may not join late, one that is given up can never be watched again: it goes on.
        """
        watched, steps = self._watched, step - self._since
        if watched is None or watched.request() is None or step - self._seen > 2 * WATCH_STEPS:
            return steps >= LEAST_STEPS
        return len(watched.arms) == 1 and steps >= WATCH_STEPS

    def begin_pass(self) -> None:
        self._observed = []

    def observes(self, record: RequestRecord) -> bool:
        """Return whether heads observe this request, in this pass and those like it."""
        has_head = record.has_head_in_use
        if record.is_watched and not has_head:
            self._observed.append(record)
        return record.is_watched or has_head

    def pay(self) -> bool:
        """Pay for one pass; return False when some head cannot be tried any more, so that plans are to be made anew."""
        can_try = True
        for record in self._observed:
            for head in record.heads:
                self._budget.pay_observing(head.plan.method)
                can_try = can_try and self._can_try(record, head, 0.0)
        return can_try

    def _can_try(self, record: RequestRecord, head: Arm, before: float) -> bool:
        control = head.control
        lag = control.probe_behind * head.lag(record.length)
        return self._budget.affords(head.plan.method, control.probe_pass + lag + HOST_PASS + before)
