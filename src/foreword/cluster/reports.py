"""How draft nodes stand, for people; needs nothing that talks to them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


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
