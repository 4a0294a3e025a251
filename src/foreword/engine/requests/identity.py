"""Whose answer it is, and how it is to be made."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.engine.adapters import LoadedAdapter
from foreword.engine.policy.assignment import CanaryPlace
from foreword.speculation.requests import DraftPlan
from foreword.speculation.service import DEFAULT_SERVICE, Service


@dataclass(frozen=True)
class Identity:
    """Whose answer it is."""

    name: str = ""  # the request's id, as its user knows it
    index: int = 0  # which of the n answers to the same prompt
    tenant: str = ""  # nothing is cached or learned across tenants
    speculation: DraftPlan | None = None  # who drafts for it; None: nobody
    tells_progress: bool = False  # every delta says what the answer has cost so far
    prediction: Sequence[int] = ()  # what its user expects as the answer
    cohort: str = ""  # as the operator's rules name it; empty: by how it draws
    step_limit: float | None = None  # seconds beyond which guesses make no step longer that serves it
    places: Sequence[CanaryPlace] = ()  # its arms in roll-outs
    service: Service = DEFAULT_SERVICE
    adapter: LoadedAdapter | None = None
