"""What a policy may look at: how drafts have fared, and what steps have cost."""

from dataclasses import dataclass, field

from foreword.speculation.measured.acceptance_stats import AcceptanceStats
from foreword.speculation.measured.costs import StepCosts
from foreword.speculation.report import StepReport

MAX_COHORTS = 64
"""Cohorts that are counted apart; those that come later are counted together."""

OTHER = "other"


def cohort_name(method: str, cohort: str) -> str:
    """Requests of one cohort, by who was asked to draft for them; empty: nobody."""
    return f"{method or 'plain'}/{cohort}"


@dataclass
class Situation:
    """All that was measured so far, and the switch for the whole engine."""

    speculating: bool = True  # False: everyone decodes plainly
    costs: StepCosts = field(default_factory=StepCosts)
    cohorts: dict[str, AcceptanceStats] = field(default_factory=dict)

    def learn(self, report: StepReport) -> None:
        """Take one step into account."""
        self.costs.observe(report)
        for part in report.requests:
            if part.applied and (part.asked or len(part.draft)):
                cohort = self._cohort(cohort_name(part.asked, part.request.cohort))
                judged = part.verdict.judged
                beyond = len(part.draft) - len(judged)
                for stats in (part.request.acceptance, cohort):
                    stats.observe(bool(part.asked), judged, len(part.verdict.path), beyond)

    def _cohort(self, name: str) -> AcceptanceStats:
        if name not in self.cohorts and len(self.cohorts) >= MAX_COHORTS:
            name = OTHER
        return self.cohorts.setdefault(name, AcceptanceStats())
