"""What the operator's rules say about one request."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.control.service import DEFAULT_SERVICE, Service
from foreword.speculation.requests import DraftPlan


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
    plan: DraftPlan | None = None  # which drafter drafts; None: none
    step_limit: float | None = None  # seconds beyond which drafts make no step longer that serves it
    places: Sequence[CanaryPlace] = ()  # its arms in roll-outs
    service: Service = DEFAULT_SERVICE
    is_check: bool = False  # an ended request is decoded again for a roll-out; it is never served
