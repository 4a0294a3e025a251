"""Limits how much drafts lengthen steps of requests without speculation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from foreword.control.service import divide_by_service
from foreword.control.trim import tightest_limit
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter
from foreword.speculation.measured.situation import Situation
from foreword.speculation.protocols import Policy
from foreword.speculation.report import StepReport
from foreword.speculation.requests import DraftPlan, PassEntry, StepRequest

SAVED_STEPS = 8
"""Steps whose share may be spent at once: useful drafts rarely fit into one step's share."""

LEVELS_MEMORY = 0.1
"""Weight of the newest call in the mean number of levels of a drafter's calls."""

MOST_AT_ONCE = 0.5
"""Maximum lengthening of one step as a fraction of its plain time; the share, if that is larger."""


class FairShare:
    """A policy wrapper: drafts lengthen mixed steps by at most a share of their plain time, on average.

    A step is mixed if it serves a request without speculation. The added time (drafter calls and the longer pass) is
    predicted from measured costs and corrected by the actual time. An unused share is saved for a few steps, because
    few steps with whole drafts gain more than many with parts. Steps also stay within their requests' own limits.
    """

    def __init__(self, policy: Policy, share: float) -> None:
        self._policy = policy
        self._share = share
        # Whether a request's own drafter observes it; always, unless the inner policy decides.
        self.notifies: Callable[[StepRequest], bool] = getattr(policy, "notifies", _always)
        self._saved = (
            0.0  # seconds by which drafts may lengthen steps; negative: they took longer than expected
        )
        self._plain: float | None = None  # expected plain seconds of the mixed step in flight
        self._reads = False  # whether that step has prompts
        self._levels: dict[str, float] = {}  # by drafter, mean levels of recent calls

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> Sequence[DraftPlan | None]:
        """Return the inner policy's plan, reduced where it would delay others too much.

        Plans that only observe, as during prefill, cost nothing and stay.
        """
        plans = self._policy.plan(entries, situation)
        self._plain = None
        if not any(plans) and not any(entry.request.speculation for entry in entries):
            return plans  # no request is delayed
        is_mixed = False
        for plan, entry in zip(plans, entries, strict=True):
            if plan is None and entry.request.speculation is None:
                is_mixed = True
                break
        limit = tightest_limit(entries)
        if not is_mixed and limit is None:
            return plans
        rows, context = sum(entry.run for entry in entries), max(entry.computed for entry in entries)
        plain = situation.costs.step_seconds(rows, context)
        self._reads = rows > len(entries)
        if is_mixed:
            self._plain = plain
        wanted = [
            p.max_nodes if p is not None and entry.draws else 0
            for p, entry in zip(plans, entries, strict=True)
        ]
        drafting = [plan for plan, nodes in zip(plans, wanted, strict=True) if plan is not None and nodes]
        if not drafting or plain is None:  # unlimited before the first measurement
            return plans
        drafted = self._draft_seconds(drafting, situation)

        def adds(nodes: int) -> float:
            return (situation.costs.step_seconds(rows + nodes, context) or plain) + drafted - plain

        room = math.inf if limit is None else limit - plain
        nodes = (
            self._affordable(sum(wanted), adds, plain, room) if is_mixed else _most(sum(wanted), adds, room)
        )
        if nodes == sum(wanted):
            return plans
        shares = divide_by_service(entries, wanted, nodes)
        return [
            plan if plan is None or not most else replace(plan, max_nodes=nodes) if nodes else None
            for plan, most, nodes in zip(plans, wanted, shares, strict=True)
        ]

    def _affordable(self, wanted: int, adds: Callable[[int], float], plain: float, room: float) -> int:
        """Return the draft tokens of a mixed step that its share and savings allow; 0 to save more.

        A step with prompts is long: it has its own share, and adds nothing to the savings.
        """
        share = self._share * plain
        if self._reads:
            return _most(wanted, adds, within=min(share, room))
        once = max(MOST_AT_ONCE * plain, share)
        nodes = _most(wanted, adds, within=min((1 + SAVED_STEPS) * share, once, room))
        return nodes if adds(nodes) <= min(share + self._saved, once) else 0

    def trim(
        self, entries: Sequence[PassEntry], drafts: Sequence[Draft], situation: Situation
    ) -> Sequence[Draft]:
        return self._policy.trim(entries, drafts, situation)

    def rows_wanted(self, requests: Sequence[StepRequest], situation: Situation, beside: int = 1) -> int:
        return self._policy.rows_wanted(requests, situation, beside)

    def learn(self, report: StepReport) -> None:
        """Add a mixed step's share, and subtract the time that drafts added."""
        if self._plain is not None and not self._reads:
            share = self._share * self._plain
            added = report.seconds.total - self._plain if report.calls else 0.0
            most = SAVED_STEPS * share  # also limits the debt after a pause
            self._saved = min(max(self._saved + share - added, -most), most)
        for call in report.calls:
            mean = self._levels.get(call.method, call.levels)
            self._levels[call.method] = mean + LEVELS_MEMORY * (call.levels - mean)
        self._policy.learn(report)

    def _draft_seconds(self, plans: Sequence[DraftPlan], situation: Situation) -> float:
        """Return the expected time of the calls. A drafter that stops itself reaches fewer levels than planned."""
        levels: dict[str, float] = {}
        for plan in plans:
            deepest: float = min(plan.max_depth, plan.max_nodes)
            if plan.stop is not None:
                deepest = min(deepest, self._levels.get(plan.method, deepest))
            levels[plan.method] = max(levels.get(plan.method, 0), deepest)
        return sum(situation.costs.draft_seconds(method, deepest) for method, deepest in levels.items())

    def drafters(self) -> Sequence[Drafter]:
        return self._policy.drafters()


def _always(request: StepRequest) -> bool:
    return True


def _most(wanted: int, adds: Callable[[int], float], within: float) -> int:
    """Return the largest number of draft tokens that adds at most this time."""
    low, high = 0, wanted
    while low < high:
        nodes = (low + high + 1) // 2
        if adds(nodes) <= within:
            low = nodes
        else:
            high = nodes - 1
    return low
