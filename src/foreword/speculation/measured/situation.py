"""What a policy may look at: how drafts have fared, and what steps have cost."""

from dataclasses import dataclass, field

from foreword.speculation.measured.acceptance_stats import AcceptanceStats, DraftOutcome
from foreword.speculation.measured.costs import StepCosts
from foreword.speculation.report import StepReport

MAX_COHORTS = 64
"""Cohorts that are counted apart; those that come later are counted together."""

OTHER = "other"


def cohort_name(method: str, cohort: str) -> str:
    """Requests of one cohort, by the drafter that was requested; empty: none."""
    return f"{method or 'plain'}/{cohort}"


@dataclass
class Situation:
    """All that was measured so far, and the switch for the whole engine."""

    speculating: bool = True  # False: everyone decodes plainly
    costs: StepCosts = field(default_factory=StepCosts)
    cohorts: dict[str, AcceptanceStats] = field(default_factory=dict)

    def learn(self, report: StepReport) -> None:
        """Take what one step has cost into account."""
        self.costs.observe(report)

    def count(self, report: StepReport) -> None:
        """Count how the drafts of a step have fared."""
        cohorts: dict[tuple[str, str], AcceptanceStats] = {}  # of this step: most requests are of the same
        for part in report.guessing:
            if part.applied:
                key, verdict = (part.asked, part.request.cohort), part.verdict
                if key not in cohorts:
                    cohorts[key] = self._cohort(cohort_name(*key))
                judged = verdict.judged
                beyond = len(verdict.draft.parents) - len(judged.parents)
                outcome = DraftOutcome(
                    bool(part.asked), len(judged.parents), judged.depth, len(verdict.path), beyond
                )
                part.request.acceptance.observe(outcome)
                cohorts[key].observe(outcome)

    def _cohort(self, name: str) -> AcceptanceStats:
        if name not in self.cohorts and len(self.cohorts) >= MAX_COHORTS:
            name = OTHER
        return self.cohorts.setdefault(name, AcceptanceStats())
