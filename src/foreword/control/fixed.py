"""The simplest policy: the same drafter and size for everyone."""

from collections.abc import Sequence

from foreword.speculation.protocols import Drafter, Planned, Scheduled, StepRequest, added_memory


class FixedPolicy:
    """Asks one drafter for up to `max_nodes` guesses at every step; without a drafter, plain decoding."""

    def __init__(
        self, drafter: Drafter | None = None, max_nodes: int = 0, max_depth: int | None = None
    ) -> None:
        self._drafter = drafter
        self.max_nodes = max_nodes
        self._max_depth = max_nodes if max_depth is None else max_depth

    def plan(self, scheduled: Sequence[Scheduled]) -> list[Planned]:
        """The same for every request."""
        return [Planned(share, self._drafter, self.max_nodes, self._max_depth) for share in scheduled]

    def forget(self, request: StepRequest) -> None:
        """Tell the drafter."""
        if self._drafter is not None:
            self._drafter.forget(request)

    def memory_bytes(self) -> int | None:
        """What the drafter says of its memory."""
        return added_memory([self._drafter])
