"""Limits how much drafts lengthen the steps of requests without speculation."""

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
"""Steps whose share may be spent at once: drafts with a gain rarely fit into the share of one."""

MOST_AT_ONCE = 0.5
"""Part of its plain time by which one step is lengthened at most, whatever was saved; the share, if it is more."""


class FairShare:
    """A policy whose drafts lengthen mixed steps by at most a share of their plain time, on average.

    A step is mixed if it serves a request without speculation. Drafting adds the drafters' own time and the longer
    pass: both are expected from measured costs, and settled by what the step took. A share that is not used is saved
    for a while: a few steps with whole drafts bring more than many with parts of them. Nor do drafts make any step
    longer than its requests allow.
    """

    def __init__(self, policy: Policy, share: float) -> None:
        self._policy = policy
        self._share = share
        # Whether a request's own drafter observes it; always, if the inner policy does not say.
        self.notifies: Callable[[StepRequest], bool] = getattr(policy, "notifies", _always)
        self._saved = (
            0.0  # seconds by which drafts may lengthen steps; less than 0: they were longer than expected
        )
        self._plain: float | None = None  # expected seconds of the mixed step in flight without drafts
        self._reads = False  # whether it has prompts

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> Sequence[DraftPlan | None]:
        """Return the inner policy's plan, with fewer draft tokens or none where they would cost others too much.

        The plan of a drafter that only observes, as in a pass of the prompt, costs nothing and stays.
        """
        plans = self._policy.plan(entries, situation)
        self._plain = None
        if not any(plans) and not any(entry.request.speculation for entry in entries):
            return plans  # no request is delayed, and nothing is saved
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
        if not drafting or plain is None:  # all before the first measurement
            return plans
        drafted = _draft_seconds(drafting, situation)

        def adds(guesses: int) -> float:
            return (situation.costs.step_seconds(rows + guesses, context) or plain) + drafted - plain

        room = math.inf if limit is None else limit - plain
        guesses = (
            self._affordable(sum(wanted), adds, plain, room) if is_mixed else _most(sum(wanted), adds, room)
        )
        if guesses == sum(wanted):
            return plans
        shares = divide_by_service(entries, wanted, guesses)
        return [
            plan if plan is None or not most else replace(plan, max_nodes=nodes) if nodes else None
            for plan, most, nodes in zip(plans, wanted, shares, strict=True)
        ]

    def _affordable(self, wanted: int, adds: Callable[[int], float], plain: float, room: float) -> int:
        """Return the draft tokens of a mixed step: as many as its share with what was saved allows, or none yet.

        A step with prompts is long: it has its own share, and nothing is saved from it for shorter ones.
        """
        share = self._share * plain
        if self._reads:
            return _most(wanted, adds, within=min(share, room))
        once = max(MOST_AT_ONCE * plain, share)
        guesses = _most(wanted, adds, within=min((1 + SAVED_STEPS) * share, once, room))
        return guesses if adds(guesses) <= min(share + self._saved, once) else 0

    def trim(
        self, entries: Sequence[PassEntry], drafts: Sequence[Draft], situation: Situation
    ) -> Sequence[Draft]:
        return self._policy.trim(entries, drafts, situation)

    def rows_wanted(self, requests: Sequence[StepRequest], situation: Situation, beside: int = 1) -> int:
        return self._policy.rows_wanted(requests, situation, beside)

    def learn(self, report: StepReport) -> None:
        """Add a mixed step's share, and subtract the time that drafts have added."""
        if self._plain is not None and not self._reads:
            share = self._share * self._plain
            added = report.seconds.total - self._plain if report.calls else 0.0
            most = SAVED_STEPS * share  # a pause is not paid for longer than that either
            self._saved = min(max(self._saved + share - added, -most), most)
        self._policy.learn(report)

    def drafters(self) -> Sequence[Drafter]:
        return self._policy.drafters()


def _always(request: StepRequest) -> bool:
    return True


def _draft_seconds(plans: Sequence[DraftPlan], situation: Situation) -> float:
    """Return the expected time of the drafters' calls."""
    levels = {plan.method: 0 for plan in plans}
    for plan in plans:
        levels[plan.method] = max(levels[plan.method], min(plan.max_depth, plan.max_nodes))
    return sum(situation.costs.draft_seconds(method, deepest) for method, deepest in levels.items())


def _most(wanted: int, adds: Callable[[int], float], within: float) -> int:
    """Return the most draft tokens that add no more than this."""
    low, high = 0, wanted
    while low < high:
        guesses = (low + high + 1) // 2
        if adds(guesses) <= within:
            low = guesses
        else:
            high = guesses - 1
    return low
