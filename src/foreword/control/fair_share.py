"""Drafts must not hold up those who don't speculate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from foreword.control.trimming import tightest_limit
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter
from foreword.speculation.measured.situation import Situation
from foreword.speculation.proposing import wishes
from foreword.speculation.protocols import Policy
from foreword.speculation.report import StepReport
from foreword.speculation.requests import DraftPlan, PassEntry, StepRequest
from foreword.speculation.service import guess_shares


class FairShare:
    """A policy whose drafts are cut so that they lengthen a mixed step by at most a share of its plain time.

    Nor do they make a step longer than the requests that it serves allow. A step is mixed if it serves a request
    that wants nobody to draft for it. What drafting adds is the drafters' own time and the longer pass; both are
    expected from what was measured.
    """

    def __init__(self, policy: Policy, share: float) -> None:
        self._policy = policy
        self._share = share

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> Sequence[DraftPlan | None]:
        """The inner policy's plan, with fewer guesses where they would cost others too much.

        For a prompt that is still being read nobody guesses in this step: its plan costs nothing and stays, as does
        that of a drafter that only reads along.
        """
        plans = self._policy.plan(entries, situation)
        pairs = zip(plans, entries, strict=True)
        is_mixed = any(plan is None and entry.request.speculation is None for plan, entry in pairs)
        limit = tightest_limit(entries)
        if not is_mixed and limit is None:
            return plans
        wanted = [
            p.max_nodes if p is not None and entry.draws else 0
            for p, entry in zip(plans, entries, strict=True)
        ]
        drafting = [plan for plan, nodes in zip(plans, wanted, strict=True) if plan is not None and nodes]
        if not drafting:
            return plans
        bounds = _Bounds(self._share if is_mixed else math.inf, math.inf if limit is None else limit)
        total = _affordable(entries, drafting, situation, bounds)
        shares = guess_shares(wishes(entries, wanted), total)
        return [
            plan if plan is None or not most else replace(plan, max_nodes=nodes) if nodes else None
            for plan, most, nodes in zip(plans, wanted, shares, strict=True)
        ]

    def trim(
        self, entries: Sequence[PassEntry], drafts: Sequence[Draft], situation: Situation
    ) -> Sequence[Draft]:
        return self._policy.trim(entries, drafts, situation)

    def rows_wanted(self, requests: Sequence[StepRequest], situation: Situation) -> int:
        return self._policy.rows_wanted(requests, situation)

    def learn(self, report: StepReport) -> None:
        self._policy.learn(report)

    def drafters(self) -> Sequence[Drafter]:
        return self._policy.drafters()

    def tells(self, request: StepRequest) -> bool:
        """Whether the request's own drafter is told of it; always, if the inner policy does not say."""
        inner = getattr(self._policy, "tells", None)
        return inner is None or bool(inner(request))


@dataclass(frozen=True)
class _Bounds:
    """How long guesses may make a step."""

    share: float  # more than without them
    seconds: float

    def allow(self, takes: float, plain: float) -> bool:
        return takes <= (1 + self.share) * plain and takes <= self.seconds


def _affordable(
    entries: Sequence[PassEntry], plans: Sequence[DraftPlan], situation: Situation, bounds: _Bounds
) -> int:
    """Most guesses that keep the step within its bounds; all before the first measurement."""
    rows, context = sum(entry.run for entry in entries), max(entry.computed for entry in entries)
    costs, wanted = situation.costs, sum(plan.max_nodes for plan in plans)
    plain = costs.step_seconds(rows, context)
    if plain is None:
        return wanted
    levels = {plan.method: 0 for plan in plans}
    for plan in plans:
        levels[plan.method] = max(levels[plan.method], min(plan.max_depth, plan.max_nodes))
    drafting = sum(costs.draft_seconds(method, deepest) for method, deepest in levels.items())
    low, high = 0, wanted
    while low < high:
        guesses = (low + high + 1) // 2
        longer = costs.step_seconds(rows + guesses, context) or plain
        if bounds.allow(longer + drafting, plain):
            low = guesses
        else:
            high = guesses - 1
    return low
