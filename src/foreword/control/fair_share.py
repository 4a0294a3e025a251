"""Drafts must not hold up those who don't speculate."""

from collections.abc import Sequence
from dataclasses import replace

from foreword.speculation.proposing import fair_shares
from foreword.speculation.protocols import Planned, Policy, Scheduled, StepRequest, added_memory
from foreword.speculation.situation import Situation


class FairShare:
    """A policy whose drafts are cut so that they lengthen a mixed step by at most a share of its plain time.

    A step is mixed if it serves a request for which nobody drafts. What drafting adds is the drafters' own
    time and the longer pass; both are expected from what was measured.
    """

    def __init__(self, policy: Policy, share: float) -> None:
        self._policy = policy
        self._share = share

    def plan(self, scheduled: Sequence[Scheduled], situation: Situation) -> Sequence[Planned]:
        """The inner policy's plan, with fewer guesses where they would cost others too much."""
        plan = self._policy.plan(scheduled, situation)
        wanted = [planned.max_nodes if planned.drafter is not None else 0 for planned in plan]
        if not any(wanted) or all(planned.drafter is not None for planned in plan):
            return plan
        affordable = self._affordable(plan, sum(wanted), situation)
        shares = fair_shares(wanted, affordable)
        return [
            replace(planned, max_nodes=nodes) if nodes else replace(planned, drafter=None)
            for planned, nodes in zip(plan, shares, strict=True)
        ]

    def _affordable(self, plan: Sequence[Planned], wanted: int, situation: Situation) -> int:
        """Most guesses, up to `wanted`, that keep the step within its share; all before the first measurement."""
        plain_rows = sum(planned.scheduled.run for planned in plan)
        plain = situation.costs.pass_seconds(plain_rows)
        if plain is None:
            return wanted
        methods = {planned.method for planned in plan if planned.drafter is not None}
        low, high = 0, wanted
        while low < high:
            guesses = (low + high + 1) // 2
            longer = situation.costs.pass_seconds(plain_rows + guesses) or plain
            drafting = sum(situation.costs.drafting_seconds(method, guesses) for method in methods)
            if longer + drafting <= (1 + self._share) * plain:
                low = guesses
            else:
                high = guesses - 1
        return low

    def forget(self, request: StepRequest) -> None:
        """Pass it on."""
        self._policy.forget(request)

    def memory_bytes(self) -> int | None:
        """Of the inner policy."""
        return added_memory([self._policy])
