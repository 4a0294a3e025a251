"""Measurements that a policy may use: acceptance statistics and step costs."""

from dataclasses import dataclass, field

from foreword.speculation.acceptance_stats import AcceptanceStats, DraftOutcome
from foreword.speculation.measured.costs import StepCosts
from foreword.speculation.report import StepReport

MAX_COHORTS = 64
"""Maximum number of cohorts with their own counts; later cohorts share one."""

OTHER = "other"


def cohort_name(method: str, cohort: str) -> str:
    """Return the name of a cohort's statistics: drafter (`plain` if none) and cohort."""
    return f"{method or 'plain'}/{cohort}"


@dataclass
class Situation:
    """All measurements so far, and the engine-wide switch for speculation."""

    speculating: bool = True  # False: all requests decode without drafts
    costs: StepCosts = field(default_factory=StepCosts)
    cohorts: dict[str, AcceptanceStats] = field(default_factory=dict)

    def learn(self, report: StepReport) -> None:
        """Update the cost estimates."""
        self.costs.observe(report)

    def count(self, report: StepReport) -> None:
        """Update the acceptance statistics."""
        cohorts: dict[tuple[str, str], AcceptanceStats] = {}  # cohorts of this step; most requests share one
        for part in report.with_drafts:
            if part.applied:
                key, verdict = (part.called, part.request.cohort), part.verdict
                if key not in cohorts:
                    cohorts[key] = self._cohort(cohort_name(*key))
                judged = verdict.judged
                beyond = len(verdict.draft.parents) - len(judged.parents)
                outcome = DraftOutcome(
                    bool(part.called), len(judged.parents), judged.depth, len(verdict.path), beyond
                )
                part.request.acceptance.observe(outcome)
                cohorts[key].observe(outcome)

    def _cohort(self, name: str) -> AcceptanceStats:
        if name not in self.cohorts and len(self.cohorts) >= MAX_COHORTS:
            name = OTHER
        return self.cohorts.setdefault(name, AcceptanceStats())
