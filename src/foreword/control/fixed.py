"""The simplest policy: the same drafter and size for everyone."""

from collections.abc import Sequence

from foreword.speculation.protocols import Drafter, Planned, Scheduled


class FixedPolicy:
    """Asks one drafter for up to `max_nodes` guesses at every step; without a drafter, plain decoding."""

    def __init__(self, drafter: Drafter | None = None, max_nodes: int = 0) -> None:
        self._drafter = drafter
        self._max_nodes = max_nodes

    def plan(self, scheduled: Sequence[Scheduled]) -> list[Planned]:
        """The same for every request."""
        return [Planned(share, self._drafter, self._max_nodes) for share in scheduled]
