"""Exploration: occasionally tries drafters that are not in use, within a time budget."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from foreword.control.decision import MOST_TRIED, Candidate, Decision
from foreword.control.requests import Arm, DraftInFlight, RequestState
from foreword.control.settings import ControlSettings
from foreword.kv.extra_rows import KEPT_STATES
from foreword.speculation.requests import DraftPlan

OBSERVED_BEFORE = 4
"""Steps that a head observes a request before it can be tried."""

States = Sequence[RequestState | None]


class Explorer:
    """Earns a fraction of step time, divided between unused drafters, and spends it on tries."""

    def __init__(self, settings: ControlSettings) -> None:
        self.settings = settings
        self.spent = 0.0  # seconds
        self.earned_from = 0.0  # seconds of steps
        # by drafter, so that an expensive one does not use up the others' budget
        self.balances: dict[str, float] = {}
        self.live: tuple[str, float] | None = None  # the drafter of a verified try, and its price
        self.watched: RequestState | None = None  # the request that heads observe for a try
        self._largest: dict[str, float] = {}  # by drafter, the most expensive recent try
        self._since = -settings.watch_steps  # step when the watched request's turn began

    def earn(self, seconds: float, share: float, drafters: Collection[str]) -> None:
        """Add a step's share to the budgets of these drafters."""
        self.earned_from += seconds
        for drafter in drafters:
            balance = self._balance(drafter)
            most = max(self.settings.probe_saved_seconds, self._largest.get(drafter, 0.0))
            self.balances[drafter] = max(balance, min(balance + share * seconds / len(drafters), most))

    def pay(self, drafter: str, seconds: float) -> None:
        """Pay for a try; a negative balance delays the next one. Negative seconds mean a gain."""
        self.balances[drafter] = self._balance(drafter) - seconds
        self._largest[drafter] = max(0.98 * self._largest.get(drafter, 0.0), seconds)
        self.spent += seconds

    def settle(self, lost: float) -> None:
        """Correct the price of a verified try by the step's actual loss or gain."""
        if self.live is not None:
            drafter, paid = self.live
            self.live = None
            self.pay(drafter, lost - paid)
            self.balances[drafter] = min(self.balances[drafter], self.settings.probe_saved_seconds)

    def affords(self, drafter: str, seconds: float) -> bool:
        """Return whether the budget covers a try."""
        return self._balance(drafter) >= seconds

    def save_for(self, drafter: str, seconds: float) -> None:
        """Raise the drafter's savings limit to the price of a try."""
        self._largest[drafter] = max(self._largest.get(drafter, 0.0), seconds)

    def buys(self, drafter: str, seconds: float) -> bool:
        """Pay for a try if the budget covers it; return whether it did."""
        self.save_for(drafter, seconds)
        if not self.affords(drafter, seconds):
            return False
        self.pay(drafter, seconds)
        return True

    @property
    def share(self) -> float:
        """Fraction of step time spent; tries with a net gain count as zero."""
        return max(self.spent, 0.0) / self.earned_from if self.earned_from else 0.0

    def _balance(self, drafter: str) -> float:
        if drafter not in self.balances:
            self.balances[drafter] = 2 * self.settings.probe_saved_seconds / (1 + len(self.balances))
        return self.balances[drafter]

    def explore(self, decision: Decision, states: States, plans: list[DraftPlan | None], step: int) -> None:
        """Try the drafter with the highest optimistic gain that the budget allows.

        Its shadow draft is compared with the later text, or verified if that costs less.
        """
        host = self.settings.probe_host_seconds
        for candidate in decision.candidates:
            self.save_for(candidate.drafter, candidate.price + host)
            if not self.affords(candidate.drafter, candidate.price + host):
                continue
            found = self._tryable(candidate, states, step)
            if not found:
                continue
            plain = [one for one in found if one[1].flight is None and one[2].plan.allows(len(states))]
            if candidate.is_live and plain:
                self._try_live(candidate, decision, plain, plans)
            else:
                self._try_shadows(candidate, decision, found, plans)
            return

    def _tryable(
        self, candidate: Candidate, states: States, step: int
    ) -> list[tuple[int, RequestState, Arm]]:
        """Return (index, request, arm) for which the drafter may be tried, rotating from step to step."""
        found = []
        for offset in range(len(states)):
            place = (step + offset) % len(states)
            state = states[place]
            if state is None:
                continue
            for arm in state.arms:
                is_known = arm.observing_plan is None or state.was_observed
                if arm.option is not candidate.option or not is_known:
                    continue
                is_busy = state.waits_for(arm) or (state.flight is not None and state.flight.arm is arm)
                if arm.plan.may_be_tried and state.may_use(arm) and not is_busy:
                    found.append((place, state, arm))
        return found

    def _try_shadows(
        self,
        candidate: Candidate,
        decision: Decision,
        found: Sequence[tuple[int, RequestState, Arm]],
        plans: list[DraftPlan | None],
    ) -> None:
        drafter, benefit = candidate.drafter, decision.benefits[candidate.option]
        seconds, host = candidate.seconds, self.settings.probe_host_seconds
        for place, state, arm in found[:MOST_TRIED]:
            request = state.request()
            plan, length = plans[place], 0 if request is None else len(request.tokens)
            flight, is_beside = state.flight, plan is not None and plan.max_nodes > 0
            seconds += candidate.lag_seconds * arm.lag(length)
            price = seconds + host
            if is_beside and not arm.is_lookup and flight is not None:
                # The gain of the draft that is skipped for the try is part of the cost.
                price += max(flight.benefit.gain, 0.0) * decision.here.per_token
            if not self.buys(drafter, price):
                return
            if is_beside and arm.is_lookup and plan is not None:
                plans[place] = replace(
                    plan, shadow=state.shadow_beside(arm, candidate.levels, benefit, length)
                )
            else:
                state.flight = DraftInFlight(arm, candidate.levels, benefit, is_shadow=True, paid=seconds)
                plans[place] = arm.planned(candidate.levels, benefit, True, arm.lag(length))
            seconds, host = candidate.more_seconds, self.settings.probe_host_seconds / 4

    def _try_live(
        self,
        candidate: Candidate,
        decision: Decision,
        found: Sequence[tuple[int, RequestState, Arm]],
        plans: list[DraftPlan | None],
    ) -> None:
        """Draft and verify for all requests of a cohort without a draft, if the budget allows it."""
        drafter, benefit = candidate.drafter, decision.benefits[candidate.option]
        lengths = [
            0 if (request := state.request()) is None else len(request.tokens) for _, state, _ in found
        ]
        lags = [arm.lag(length) for (_, _, arm), length in zip(found, lengths, strict=True)]
        loss = self.settings.probe_host_seconds + candidate.live_loss + candidate.lag_seconds * sum(lags)
        if not self.buys(drafter, loss):
            return
        self.live = drafter, loss
        for (place, state, arm), lag in zip(found, lags, strict=True):
            levels = benefit.depth if state.is_coupled else benefit.kept
            # Verified without an expected gain, as paid for.
            state.flight = DraftInFlight(arm, levels, benefit, verified=benefit.kept)
            plans[place] = arm.planned(levels, benefit, True, lag)

    def watch(self, states: States, decision: Decision, step: int) -> None:
        """Select the request that heads observe for a try: one at a time, while a try is affordable.

        Observing every request would cost a rarely tried head far more than its tries.
        """
        watched, turn = self.watched, step - self._since
        if watched is not None:
            # If a head cannot join late, an abandoned request can never be watched again, so keep it.
            had_turn = turn >= self.settings.watch_steps and (len(watched.arms) == 1 or watched not in states)
            if watched.request() is None or had_turn or not self._can_try(watched, decision.candidates, 0):
                self.watched = None
        if self.watched is None and turn >= self.settings.watch_steps // 4:
            host = (1 + OBSERVED_BEFORE) * self.settings.probe_host_seconds
            for one in decision.heads_to_try:
                self.save_for(one.drafter, one.price + host + one.lag_seconds * KEPT_STATES)
            heads = [one for one in decision.heads_to_try if self.affords(one.drafter, one.price + host)]
            # Newest first: the oldest may end soon.
            found = [s for s in reversed(states) if s is not None and s is not watched] if heads else []
            chosen = next((s for s in found if self._can_try(s, heads, OBSERVED_BEFORE)), None)
            if chosen is not None:
                self.watched, self._since = chosen, step

    def _can_try(self, state: RequestState, candidates: Sequence[Candidate], observed: int) -> bool:
        request = state.request()
        length = 0 if request is None else len(request.tokens)
        host = (1 + observed) * self.settings.probe_host_seconds
        for candidate in candidates:
            for head in state.heads:
                if head.option is candidate.option and state.may_use(head):
                    price = candidate.price + candidate.lag_seconds * head.lag(length) + host
                    if self.affords(head.plan.method, price):
                        return True
        return False

    def pay_observing(self) -> None:
        """Pay for a step in which the watched request was observed."""
        if self.watched is not None:
            for head in self.watched.heads:
                self.pay(head.plan.method, self.settings.probe_host_seconds)
