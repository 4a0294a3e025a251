"""Assigns requests to nodes: near, not overloaded, and stable."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

LOAD_BOUND = 1.25  # maximum requests on a node, as a multiple of its share by capacity
MOVES_PER_SECOND = 0.05  # fraction of the requests that may move, since a new node processes the text again
LABELS = ("host", "rack", "zone")  # names of labels by which nodes and targets are near, nearest first


@dataclass(frozen=True)
class NodeCandidate:
    """A node to which a request could be assigned."""

    name: str
    capacity: int  # maximum number of this target's requests
    assigned: int  # number of this target's requests on it
    distance: int = 0  # see `distance`


def distance(ours: Mapping[str, str], theirs: Mapping[str, str]) -> int:
    """Return 0 for labels of the same host, 1 for the same rack, 2 for the same zone, otherwise 3."""
    for index, label in enumerate(LABELS):
        if ours.get(label) and ours.get(label) == theirs.get(label):
            return index
    return len(LABELS)


def assign_node(request: int, nodes: Sequence[NodeCandidate]) -> str | None:
    """Return the name of the request's node, by rendezvous hashing among the nearest nodes with free capacity.

    Return None if all are full. When nodes join or leave, requests on other nodes stay there. Larger nodes are selected
    more often.
    """
    for nearest in sorted({node.distance for node in nodes}):
        near = [node for node in nodes if node.distance == nearest and node.capacity > 0]
        total, capacity = sum(node.assigned for node in near) + 1, sum(node.capacity for node in near)
        limits = [math.ceil(LOAD_BOUND * total * node.capacity / capacity) for node in near]
        free = [n for n, limit in zip(near, limits, strict=True) if n.assigned < min(n.capacity, limit)]
        if free:
            return max(free, key=lambda node: _score(request, node)).name
    return None


def _score(request: int, node: NodeCandidate) -> float:
    """Return a pseudo-random score; the node with the highest one is selected in proportion to its capacity."""
    digest = blake2b(f"{request}/{node.name}".encode(), digest_size=8).digest()
    share = (int.from_bytes(digest, "big") + 0.5) / 2**64
    return -node.capacity / math.log(share)


class MoveBudget:
    """Limits how many requests move to another node."""

    def __init__(self, now: float) -> None:
        self._left = 1.0  # number of moves that are allowed now
        self._at = now  # time of this number

    def take(self, now: float, assigned: int) -> bool:
        """Return whether a request may move now, and count the move; `assigned` requests are on nodes."""
        rate = max(MOVES_PER_SECOND * assigned, 1.0)
        self._left = min(self._left + (now - self._at) * rate, rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
