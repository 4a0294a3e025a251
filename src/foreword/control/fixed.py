"""The simplest policy: every request's own plan at every step."""

from collections.abc import Sequence

from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter
from foreword.speculation.measured.situation import Situation
from foreword.speculation.report import StepReport
from foreword.speculation.requests import DraftPlan, PassEntry, StepRequest


def fixed_plan(request: StepRequest, running: int) -> DraftPlan | None:
    """Return the plan of a request that drafts in every step; None: no such request, or too many run."""
    plan = request.speculation
    return plan if plan is not None and plan.is_fixed and plan.allows(running) else None


class FixedPolicy:
    """Calls each request's own drafter with the request's limits.

    A drafter given here serves all requests, for tests and measurements.
    """

    def __init__(
        self, drafter: Drafter | None = None, max_nodes: int = 0, max_depth: int | None = None
    ) -> None:
        depth = max_nodes if max_depth is None else max_depth
        self._everyone = None if drafter is None else DraftPlan("given", drafter, max_nodes, depth)

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> list[DraftPlan | None]:
        """Return the requests' plans; None above a plan's batch limit."""
        plans = [self._chosen(entry.request) for entry in entries]
        return [plan if plan is not None and plan.allows(len(plans)) else None for plan in plans]

    def trim(
        self, entries: Sequence[PassEntry], drafts: Sequence[Draft], situation: Situation
    ) -> Sequence[Draft]:
        return drafts

    def rows_wanted(self, requests: Sequence[StepRequest], situation: Situation, beside: int = 1) -> int:
        """Return all draft tokens allowed next to `beside` other requests; a prompt counts as one."""
        plans = [plan for plan in map(self._chosen, requests) if plan is not None]
        running = len(requests) + beside
        return sum(plan.max_nodes for plan in plans if plan.allows(running))

    def learn(self, report: StepReport) -> None:
        """Do nothing."""

    def drafters(self) -> list[Drafter]:
        return [] if self._everyone is None else [self._everyone.drafter]

    def _chosen(self, request: StepRequest) -> DraftPlan | None:
        return self._everyone or request.speculation
