"""Assigns requests to nodes: near, not overloaded, and the same one as long as possible."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

LOAD_BOUND = 1.25
"""No node has more than this many times its share of the requests."""

MOVES_PER_SECOND = 0.05
"""Part of the requests that may move to another node per second: each has to be prefilled there again."""

LABELS = ("host", "rack", "zone")
"""What nodes and targets may have in common, the nearest first."""


@dataclass(frozen=True)
class NodeCandidate:
    """A node to which a request could be assigned."""

    name: str
    capacity: int  # requests
    assigned: int  # requests of this target that it has
    distance: int = 0  # see `distance`


def distance(ours: Mapping[str, str], theirs: Mapping[str, str]) -> int:
    """0: the same host; then the same rack, the same zone, elsewhere."""
    for steps, label in enumerate(LABELS):
        if ours.get(label) and ours.get(label) == theirs.get(label):
            return steps
    return len(LABELS)


def assign_node(request: int, places: Sequence[NodeCandidate]) -> str | None:
    """Return a node by rendezvous hash among the nearest that have capacity left; None: none has.

    When nodes come or go, other requests keep theirs; nodes with more capacity are chosen more often.
    """
    for steps in sorted({place.distance for place in places}):
        near = [place for place in places if place.distance == steps and place.capacity > 0]
        total, capacity = sum(place.assigned for place in near) + 1, sum(place.capacity for place in near)
        free = [
            place
            for place in near
            if place.assigned < min(place.capacity, math.ceil(LOAD_BOUND * total * place.capacity / capacity))
        ]
        if free:
            return max(free, key=lambda place: _score(request, place)).name
    return None


def _score(request: int, place: NodeCandidate) -> float:
    digest = blake2b(f"{request}/{place.name}".encode(), digest_size=8).digest()
    share = (int.from_bytes(digest, "big") + 0.5) / 2**64
    return -place.capacity / math.log(share)


class MoveBudget:
    """Limits how many requests move to another node."""

    def __init__(self, now: float) -> None:
        self._left = 1.0
        self._at = now

    def take(self, now: float, assigned: int) -> bool:
        """Whether one more may move."""
        rate = max(MOVES_PER_SECOND * assigned, 1.0)
        self._left = min(self._left + (now - self._at) * rate, rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
