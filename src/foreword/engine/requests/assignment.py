"""What the operator's rules say about one request."""

from dataclasses import dataclass

from foreword.speculation.requests import DraftPlan
from foreword.speculation.service import DEFAULT_SERVICE, Service


@dataclass(frozen=True)
class CanaryPlace:
    """The arm of a roll-out that a request belongs to."""

    drafter: str
    cohort: str
    is_canary: bool


@dataclass(frozen=True)
class Assignment:
    """What the rules say about a request."""

    cohort: str = ""  # that it is counted with; empty: by how it draws
    plan: DraftPlan | None = None
    step_limit: float | None = None  # seconds
    places: tuple[CanaryPlace, ...] = ()
    service: Service = DEFAULT_SERVICE
