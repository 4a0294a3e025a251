"""Exploration: occasionally compares drafters that are not in use with the text, within a time budget."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from foreword.control.decision import Candidate, Decision
from foreword.control.requests import Arm, DraftInFlight, RequestState
from foreword.control.settings import ControlSettings
from foreword.speculation.requests import DraftPlan

OBSERVED_BEFORE = 4
"""Steps that a head observes a request before it can be tried."""

States = Sequence[RequestState | None]


class Explorer:
    """Earns a fraction of step time, divided between unused drafters, and spends it on shadow drafts."""

    def __init__(self, settings: ControlSettings) -> None:
        self.settings = settings
        self.spent = 0.0  # seconds
        self.earned_from = 0.0  # seconds of steps
        # by drafter, so that an expensive one does not use up the others' budget
        self.balances: dict[str, float] = {}
        self.watched: RequestState | None = None  # the request that heads observe for a try
        self._largest: dict[str, float] = {}  # by drafter, the most expensive recent or wanted try
        self._since = -settings.watch_steps  # step when the watched request's turn began

    def earn(self, seconds: float, share: float, drafters: Collection[str]) -> None:
        """Add a step's share to the budgets of these drafters."""
        self.earned_from += seconds
        for drafter in drafters:
            balance = self._balance(drafter)
            limit = max(self.settings.probe_saved_seconds, self._largest.get(drafter, 0.0))
            self.balances[drafter] = max(balance, min(balance + share * seconds / len(drafters), limit))

    def pay(self, drafter: str, seconds: float) -> None:
        """Pay for a try; a negative balance delays the next one."""
        self.balances[drafter] = self._balance(drafter) - seconds
        self._largest[drafter] = max(0.98 * self._largest.get(drafter, 0.0), seconds)
        self.spent += seconds

    def affords(self, drafter: str, seconds: float, reserve: float = 0.0) -> bool:
        """Return whether the budget covers a try; if not, save up to its price and the reserve."""
        self._largest[drafter] = max(self._largest.get(drafter, 0.0), seconds + reserve)
        return self._balance(drafter) >= seconds

    @property
    def share(self) -> float:
        """Fraction of step time spent."""
        return self.spent / self.earned_from if self.earned_from else 0.0

    def _balance(self, drafter: str) -> float:
        if drafter not in self.balances:
            self.balances[drafter] = 2 * self.settings.probe_saved_seconds / (1 + len(self.balances))
        return self.balances[drafter]

    def explore(self, decision: Decision, states: States, plans: list[DraftPlan | None], step: int) -> None:
        """Request shadow drafts from the drafter with the highest optimistic gain that the budget allows."""
        for candidate in decision.candidates:
            if self.affords(candidate.drafter, candidate.price + self.settings.probe_host_seconds):
                found = self._tryable(candidate, states, step)
                if found:
                    self._request(candidate, decision, found, plans)
                    return

    def _tryable(
        self, candidate: Candidate, states: States, step: int
    ) -> list[tuple[int, RequestState, Arm]]:
        """Return (index, request, arm) for which the drafter may be tried, rotating from step to step."""
        found = []
        for offset in range(len(states)):
            place = (step + offset) % len(states)
            state = states[place]
            for arm in () if state is None else state.arms:
                if arm.option is not candidate.option or state is None:
                    continue
                is_known = arm.observing_plan is None or state.was_observed
                if is_known and arm.plan.may_be_tried and state.may_use(arm):
                    is_busy = state.flight is not None and state.flight.arm is arm
                    if not is_busy and not state.waits_for(arm):
                        found.append((place, state, arm))
            if len(found) >= self.settings.probe_requests:
                break
        return found[: self.settings.probe_requests]

    def _request(
        self,
        candidate: Candidate,
        decision: Decision,
        found: Sequence[tuple[int, RequestState, Arm]],
        plans: list[DraftPlan | None],
    ) -> None:
        drafter, benefit = candidate.drafter, decision.benefits[candidate.option]
        seconds, host = candidate.seconds, self.settings.probe_host_seconds
        for place, state, arm in found:
            plan, flight, lag = plans[place], state.flight, arm.lag(state.length)
            seconds += candidate.lag_seconds * lag
            price, is_beside = seconds + host, plan is not None and plan.max_nodes > 0
            if is_beside and not arm.is_lookup and flight is not None:
                # The gain of the draft that is skipped for the try is part of the cost.
                price += max(flight.benefit.gain, 0.0) * decision.here.per_token
            if not self.affords(drafter, price):
                return
            self.pay(drafter, price)
            if is_beside and arm.is_lookup and plan is not None:
                plans[place] = replace(plan, shadow=state.shadow_beside(arm, candidate.levels, benefit))
            else:
                state.flight = DraftInFlight(arm, candidate.levels, benefit, is_shadow=True, paid=seconds)
                plans[place] = arm.planned(candidate.levels, benefit, True, lag)
            seconds, host = candidate.more_seconds, self.settings.probe_host_seconds / 4

    def watch(self, states: States, decision: Decision, step: int) -> None:
        """Select the request that heads observe for a try: one at a time, while a try is affordable.

        Observing every request would cost a rarely tried head far more than its tries.
        """
        watched, turn = self.watched, step - self._since
        if watched is not None:
            # If a head cannot join late, an abandoned request can never be watched again, so keep it.
            had_turn = turn >= self.settings.watch_steps and (len(watched.arms) == 1 or watched not in states)
            if watched.request() is None or had_turn or not self._can_try(watched, decision, 0):
                self.watched = None
        if self.watched is None and turn >= self.settings.watch_steps // 4:
            host = (2 + OBSERVED_BEFORE) * self.settings.probe_host_seconds
            heads = decision.heads_to_try
            # Two tries: the second has little to catch up, so that the costs of both parts become known.
            if not any(self.affords(one.drafter, 2 * one.price + host, one.catch_up) for one in heads):
                return
            for state in reversed(states):  # newest first: the oldest may end soon
                if (
                    state is not None
                    and state is not watched
                    and self._can_try(state, decision, OBSERVED_BEFORE)
                ):
                    self.watched, self._since = state, step
                    return

    def _can_try(self, state: RequestState, decision: Decision, observed: int) -> bool:
        """Return whether the budget covers a try of a head after it has observed so many steps."""
        host, length = (1 + observed) * self.settings.probe_host_seconds, state.length
        for candidate in decision.heads_to_try:
            for head in state.heads:
                if head.option is candidate.option and state.may_use(head):
                    price = candidate.price + candidate.lag_seconds * head.lag(length) + host
                    if self.affords(candidate.drafter, price, candidate.catch_up):
                        return True
        return False

    def pay_observing(self) -> None:
        """Pay for a step in which the watched request was observed."""
        for head in () if self.watched is None else self.watched.heads:
            self.pay(head.plan.method, self.settings.probe_host_seconds)
