"""The simplest policy: what was asked for, at every step."""

from collections.abc import Sequence

from foreword.speculation.protocols import (
    Drafter,
    Planned,
    Scheduled,
    Speculation,
    StepRequest,
    added_memory,
)
from foreword.speculation.situation import Situation


class FixedPolicy:
    """Asks every request's own drafter for as many guesses as the request wants.

    With a drafter given here, that one is asked for everyone, whatever they want: for tests and measurements.
    """

    def __init__(
        self, drafter: Drafter | None = None, max_nodes: int = 0, max_depth: int | None = None
    ) -> None:
        depth = max_nodes if max_depth is None else max_depth
        self._everyone = None if drafter is None else Speculation("given", drafter, max_nodes, depth)

    def plan(self, scheduled: Sequence[Scheduled], situation: Situation) -> list[Planned]:
        """The same at every step, however it goes."""
        return [self._planned(share) for share in scheduled]

    def _planned(self, share: Scheduled) -> Planned:
        chosen = self._chosen(share.request)
        if chosen is None:
            return Planned(share)
        return Planned(share, chosen.drafter, chosen.max_nodes, chosen.max_depth, chosen.method)

    def forget(self, request: StepRequest) -> None:
        """Tell its drafter."""
        chosen = self._chosen(request)
        if chosen is not None:
            chosen.drafter.forget(request)

    def memory_bytes(self) -> int | None:
        """What the given drafter says of its memory."""
        return added_memory([] if self._everyone is None else [self._everyone.drafter])

    def _chosen(self, request: StepRequest) -> Speculation | None:
        return self._everyone or request.speculation
