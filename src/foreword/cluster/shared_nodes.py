"""Connections to draft nodes, shared by several drafters of an engine."""

from collections import Counter
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING

from foreword.cluster.settings import RemoteConfig
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftRequest, DraftSource, DraftTask, NodeReport, Traits

if TYPE_CHECKING:  # needs msgspec, which is optional
    from foreword.cluster.remote_drafter import RemoteDrafter


REMOTE = Traits(
    DraftSource.REMOTE,
    expects_requests=True,  # nodes process prompts while requests wait
    may_be_absent=True,
    needs_target="a node does not ask other nodes",
)
"""Traits of drafters that use draft nodes."""


class SharedNodes:
    """One `RemoteDrafter` per configuration: created for the first user, closed with the last."""

    def __init__(self) -> None:
        self._lock = Lock()  # guards `_uses`
        self._uses: dict[RemoteConfig, list[NodesUse]] = {}

    def use(self, config: RemoteConfig, make: Callable[[], "RemoteDrafter"]) -> "NodesUse":
        """Return a new user of these nodes; for the first user, `make` creates the drafter that connects to them."""
        with self._lock:
            uses = self._uses.setdefault(config, [])
            use = NodesUse(self, config, uses[0].drafter if uses else make())
            uses.append(use)
            return use

    def is_first(self, use: "NodesUse") -> bool:
        """Return whether this is the first user; only the first reports the nodes, so that none is counted twice."""
        return self._uses.get(use.config, [])[:1] == [use]

    def end(self, use: "NodesUse") -> None:
        """Remove a user, and close the drafter after its last one; may be repeated."""
        with self._lock:
            uses = self._uses.get(use.config, [])
            left = [other for other in uses if other is not use]
            self._uses[use.config] = left
        if uses and not left:
            use.drafter.close()


class NodesUse(Drafter):
    """One of the drafters that share a `RemoteDrafter`, to which it passes all calls."""

    traits = REMOTE

    def __init__(self, shared: SharedNodes, config: RemoteConfig, drafter: "RemoteDrafter") -> None:
        self.config = config
        self.drafter = drafter
        self._shared = shared

    @property
    def absent(self) -> tuple[str, ...]:
        return self.drafter.absent

    def expect(self, request: DraftRequest) -> None:
        self.drafter.expect(request)

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        return self.drafter.propose(tasks)

    def forget(self, request: DraftRequest) -> None:
        self.drafter.forget(request)

    def close(self) -> None:
        self._shared.end(self)

    def nodes(self) -> list[NodeReport]:
        return self.drafter.nodes() if self._shared.is_first(self) else []

    def fault_counts(self) -> Counter[str]:
        return self.drafter.fault_counts() if self._shared.is_first(self) else Counter()
