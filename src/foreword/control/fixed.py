"""The simplest policy: a request's plan, at every step."""

from collections.abc import Sequence

from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter
from foreword.speculation.measured.situation import Situation
from foreword.speculation.report import StepReport
from foreword.speculation.requests import DraftPlan, PassEntry, StepRequest


class FixedPolicy:
    """Calls every request's own drafter for as many draft tokens as the request wants.

    With a drafter given here, that one drafts for all requests: for tests and measurements.
    """

    def __init__(
        self, drafter: Drafter | None = None, max_nodes: int = 0, max_depth: int | None = None
    ) -> None:
        depth = max_nodes if max_depth is None else max_depth
        self._everyone = None if drafter is None else DraftPlan("given", drafter, max_nodes, depth)

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> list[DraftPlan | None]:
        """Return the same plans at every step; none where as many requests run as a plan allows at most."""
        plans = [self._chosen(entry.request) for entry in entries]
        return [plan if plan is not None and plan.allows(len(plans)) else None for plan in plans]

    def trim(
        self, entries: Sequence[PassEntry], drafts: Sequence[Draft], situation: Situation
    ) -> Sequence[Draft]:
        return drafts

    def rows_wanted(self, requests: Sequence[StepRequest], situation: Situation, beside: int = 1) -> int:
        """Return all draft tokens that may be made beside so many others: a prompt is one more request."""
        plans = [plan for plan in map(self._chosen, requests) if plan is not None]
        running = len(requests) + beside
        return sum(plan.max_nodes for plan in plans if plan.allows(running))

    def learn(self, report: StepReport) -> None:
        """Learn nothing."""

    def drafters(self) -> list[Drafter]:
        return [] if self._everyone is None else [self._everyone.drafter]

    def _chosen(self, request: StepRequest) -> DraftPlan | None:
        return self._everyone or request.speculation
