"""Base class of lookup drafters with per-request state."""

from collections.abc import Sequence
from typing import Generic, TypeVar

from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftRequest, DraftTask

Kept = TypeVar("Kept")


class LookupDrafter(Drafter, Generic[Kept]):
    """Drafts for each request separately, and keeps state per request until it ends."""

    def __init__(self) -> None:
        self._known: dict[int, Kept] = {}  # by request id

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        return [self.draft(task) for task in tasks]

    def draft(self, task: DraftTask) -> Draft:
        """Return one request's draft."""
        raise NotImplementedError

    def forget(self, request: DraftRequest) -> None:
        self._known.pop(request.request_id, None)
