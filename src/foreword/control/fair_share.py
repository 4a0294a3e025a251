"""Limits how much drafts lengthen steps of requests without speculation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from foreword.control.service import divide_by_service_class
from foreword.control.settings import DEFAULTS
from foreword.control.trim import tightest_limit
from foreword.speculation.measured.situation import Situation
from foreword.speculation.protocols import Policy
from foreword.speculation.report import StepReport
from foreword.speculation.requests import DraftPlan, PassEntry, StepRequest

LEVELS_MEMORY = 0.1
"""Weight of the newest call in the mean number of levels of a drafter's calls."""


class FairShare:
    """A policy wrapper: drafts lengthen mixed steps by at most a share of their plain time, on average.

    A step is mixed if it serves a request without speculation. The added time (drafter calls and the longer pass) is
    predicted from measured costs and corrected by the actual time. An unused share is saved for a few steps, because
    few steps with whole drafts gain more than many with parts. Steps also stay within their requests' own limits.
    """

    def __init__(self, policy: Policy, share: float) -> None:
        self._policy = policy
        self._share = share
        self.trim, self.rows_wanted, self.drafters = policy.trim, policy.rows_wanted, policy.drafters
        # Whether a request's own drafter observes it; always, unless the inner policy decides.
        self.notifies: Callable[[StepRequest], bool] = getattr(policy, "notifies", lambda request: True)
        # Seconds by which drafts may lengthen steps; negative: they took longer than expected.
        self._saved = 0.0
        self._plain: float | None = None  # expected plain seconds of the mixed step in flight
        self._reads = False  # whether that step has prompts
        self._levels: dict[str, float] = {}  # by drafter, mean levels of recent calls

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> Sequence[DraftPlan | None]:
        """Return the inner policy's plan, reduced where it would delay others too much.

        Plans that only observe, as during prefill, cost nothing and stay.
        """
        plans, limit = self._policy.plan(entries, situation), tightest_limit(entries)
        self._plain = None
        pairs = list(zip(plans, entries, strict=True))
        speculates = [plan is not None or entry.request.speculation is not None for plan, entry in pairs]
        is_mixed = not all(speculates)
        if not any(speculates) or not (is_mixed or limit is not None):
            return plans  # no request is delayed
        rows, context = sum(entry.run for entry in entries), max(entry.computed for entry in entries)
        plain = situation.costs.step_seconds(rows, context)
        self._reads = rows > len(entries)
        if is_mixed:
            self._plain = plain
        wanted = [plan.max_nodes if plan is not None and entry.draws else 0 for plan, entry in pairs]
        if not any(wanted) or plain is None:  # unlimited before the first measurement
            return plans
        drafting = [plan for plan, nodes in zip(plans, wanted, strict=True) if plan is not None and nodes]
        drafted = self._draft_seconds(drafting, situation)

        def adds(nodes: int) -> float:
            return (situation.costs.step_seconds(rows + nodes, context) or plain) + drafted - plain

        room, total = math.inf if limit is None else limit - plain, sum(wanted)
        nodes = self._affordable(total, adds, plain, room) if is_mixed else _most(total, adds, room)
        if nodes == total:
            return plans
        shares = divide_by_service_class(entries, wanted, nodes)
        return [
            plan if plan is None or not wish else replace(plan, max_nodes=share) if share else None
            for plan, wish, share in zip(plans, wanted, shares, strict=True)
        ]

    def _affordable(self, wanted: int, adds: Callable[[int], float], plain: float, room: float) -> int:
        """Return the draft tokens of a mixed step that its share and savings allow; 0 to save more.

        A step with prompts is long: it has its own share, and adds nothing to the savings.
        """
        share = self._share * plain
        if self._reads:
            return _most(wanted, adds, min(share, room))
        once = max(DEFAULTS.share_once * plain, share)
        nodes = _most(wanted, adds, min((1 + DEFAULTS.share_steps) * share, once, room))
        return nodes if adds(nodes) <= min(share + self._saved, once) else 0

    def learn(self, report: StepReport) -> None:
        """Add a mixed step's share, and subtract the time that drafts added."""
        if self._plain is not None and not self._reads:
            share = self._share * self._plain
            added = report.seconds.total - self._plain if report.calls else 0.0
            most = DEFAULTS.share_steps * share  # also limits the debt after a pause
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


def _most(wanted: int, adds: Callable[[int], float], within: float) -> int:
    """Return the largest number of draft tokens that adds at most this time."""
    low, high = 0, wanted
    while low < high:
        nodes = (low + high + 1) // 2
        low, high = (nodes, high) if adds(nodes) <= within else (low, nodes - 1)
    return low
