"""Who may be asked for a request, and who is."""

from dataclasses import replace

from foreword.control.decisions.arms import Arm
from foreword.control.decisions.records import RequestRecord
from foreword.speculation.requests import DraftPlan, PassEntry, StepRequest


def best_arm(record: RequestRecord, running: int) -> Arm | None:
    """Of the drafters that pay for a request, the most promising; None: none pays."""
    best: Arm | None = None
    for arm in record.arms:
        if not arm.pays or not arm.plan.allows(running) or not record.may_ask(arm):
            continue
        if best is None or arm.promise > best.promise:
            best = arm
    return best


def is_fixed(request: StepRequest) -> bool:
    """Whether nothing is decided for it: its plan is done as it stands."""
    return request.speculation is not None and request.speculation.is_fixed


def fixed_plan(plan: DraftPlan | None, running: int) -> DraftPlan | None:
    """A plan that is done as it stands; None: there is none."""
    return plan if plan is not None and plan.is_fixed and plan.allows(running) else None


def wanted_rows(request: StepRequest, record: RequestRecord | None, running: int) -> int:
    """Rows that guesses for a request are worth at present; nothing is decided for one without a record."""
    arm = None if record is None else best_arm(record, running)
    if arm is not None:
        return min(arm.control.worth.kept, arm.plan.max_nodes)
    plan = request.speculation
    return plan.max_nodes if plan is not None and plan.is_fixed else 0


def can_ask(entry: PassEntry, record: RequestRecord) -> bool:
    """Whether anybody could guess in this pass: a head knows the states of a prompt only when it is over."""
    return entry.draws and (entry.run == 1 or not record.heads)


def present_name(plan: DraftPlan) -> str:
    """A plan's method without those of its drafters that can say nothing at present.

    What the others say then is measured as theirs, and not mixed up with what all of them say together.
    """
    absent = plan.drafter.absent
    present = [name for name in plan.method.split("+") if name not in absent]
    return "+".join(present) or plan.method


def plans_of(plan: DraftPlan) -> list[DraftPlan]:
    """The plans of those that a plan leaves the choice between."""
    choices = plan.drafter.choices
    return [replace(plan, method=name, drafter=drafter) for name, drafter in choices.items()] or [plan]
