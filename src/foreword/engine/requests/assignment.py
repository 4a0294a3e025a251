"""The policy file's decisions for one request."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.control.service import DEFAULT_SERVICE, Service
from foreword.speculation.requests import DraftPlan


@dataclass(frozen=True)
class CanaryPlace:
    """The roll-out arm of a request."""

    drafter: str
    cohort: str
    is_canary: bool


@dataclass(frozen=True)
class Assignment:
    """The policy file's decisions for a request."""

    cohort: str = ""  # for statistics; empty: by kind of sampling
    plan: DraftPlan | None = None  # None: no drafter
    step_limit: float | None = None  # maximum seconds of a step with drafts that serves it
    places: Sequence[CanaryPlace] = ()  # its roll-out arms
    service: Service = DEFAULT_SERVICE
    is_check: bool = False  # an ended request decoded again for a roll-out; never served
