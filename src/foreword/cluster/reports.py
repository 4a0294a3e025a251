"""The state of draft nodes as operators see it, and connections that several drafters of an engine share."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from foreword.cluster.settings import RemoteConfig
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Ask, DraftRequest

if TYPE_CHECKING:  # needs msgspec, which engines without draft nodes do without
    from foreword.cluster.remote_drafter import RemoteDrafter


@dataclass(frozen=True)
class NodeReport:
    """One node, as one target knows it."""

    address: str
    state: str  # "up", "shadow" (compared, not used yet), "late" (used, not waited for), "draining" or "down"
    reason: str = ""  # why it is not waited for; empty: it is
    method: str = ""
    homes: int = 0  # requests that it drafts for
    trips: int = 0  # times that it was found late or lost
    waits: int = 0  # passes that waited for it
    wait_seconds: float = 0.0  # of all of them
    # Measured of late; None: of nothing yet, or the node is down.
    first_ms: float | None = None  # from a text to the first level behind it
    level_ms: float | None = None  # from one level to the next
    judged: int = 0  # drafts that were compared with the text
    acceptance: float | None = None  # of first levels


@runtime_checkable
class ReportsNodes(Protocol):
    """A drafter, or what is made of drafters, that asks nodes."""

    def nodes(self) -> list[NodeReport]:
        """All that it knows of."""
        ...


def all_nodes(parts: Iterable[object]) -> list[NodeReport]:
    """Of the parts that ask nodes."""
    return [node for part in parts if isinstance(part, ReportsNodes) for node in part.nodes()]


class SharedNodes:
    """One `RemoteDrafter` for all who say the same of nodes: made for the first of them, closed with the last."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._uses: dict[RemoteConfig, list[NodesUse]] = {}

    def use(self, config: RemoteConfig, make: Callable[[], "RemoteDrafter"]) -> "NodesUse":
        """One more; `make` connects if nobody does yet."""
        with self._lock:
            before = self._uses.get(config, [])
            use = NodesUse(self, config, before[0].drafter if before else make())
            self._uses[config] = [*before, use]
            return use

    def is_first(self, use: "NodesUse") -> bool:
        """One of them tells how the nodes stand, so that nothing is told twice."""
        return self._uses.get(use.config, [])[:1] == [use]

    def end(self, use: "NodesUse") -> None:
        with self._lock:
            uses = self._uses.get(use.config, [])
            left = [one for one in uses if one is not use]
            self._uses[use.config] = left
        if uses and not left:
            use.drafter.close()


class NodesUse:
    """The shared drafter as one of those who share it has it."""

    expects = True
    may_be_absent = True

    def __init__(self, shared: SharedNodes, config: RemoteConfig, drafter: "RemoteDrafter") -> None:
        self.config = config
        self.drafter = drafter
        self._shared = shared

    @property
    def absent(self) -> tuple[str, ...]:
        return self.drafter.absent

    def expect(self, request: DraftRequest) -> None:
        self.drafter.expect(request)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return self.drafter.propose(asks)

    def forget(self, request: DraftRequest) -> None:
        self.drafter.forget(request)

    def close(self) -> None:
        self._shared.end(self)

    def nodes(self) -> list[NodeReport]:
        return self.drafter.nodes() if self._shared.is_first(self) else []

    def fault_counts(self) -> Counter[str]:
        return self.drafter.fault_counts() if self._shared.is_first(self) else Counter()
