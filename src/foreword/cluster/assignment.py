"""Assigns requests to draft nodes: to near ones with free capacity, and to the same node for as long as possible."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

LOAD_BOUND = 1.25  # maximum requests on a node, as a multiple of its share by capacity
MOVES_PER_SECOND = (
    0.05  # fraction of the requests that may move per second: the new node processes the text again
)
LABELS = (
    "host",
    "rack",
    "zone",
)  # labels of nodes and targets; the first one that is equal gives their distance


@dataclass(frozen=True)
class NodeCandidate:
    """A node to which a request could be assigned."""

    name: str
    capacity: int  # maximum number of this target's requests
    assigned: int  # number of this target's requests on it
    distance: int = 0  # from the target, as the function `distance` returns it


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
        requests = sum(node.assigned for node in near) + 1
        capacity = sum(node.capacity for node in near)
        free = []
        for node in near:
            limit = math.ceil(LOAD_BOUND * requests * node.capacity / capacity)
            if node.assigned < min(node.capacity, limit):
                free.append(node)
        if free:
            return max(free, key=lambda node: _score(request, node)).name
    return None


def _score(request: int, node: NodeCandidate) -> float:
    """Return a pseudo-random score: a node has the highest one with a probability proportional to its capacity."""
    digest = blake2b(f"{request}/{node.name}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "big") + 0.5) / 2**64  # between 0 and 1
    return -node.capacity / math.log(uniform)


class MoveBudget:
    """Limits how many requests move to another node (a token bucket)."""

    def __init__(self, now: float) -> None:
        self._left = 1.0  # number of moves that are allowed now
        self._updated_at = now  # time of the last change of `_left`, in seconds

    def take(self, now: float, assigned: int) -> bool:
        """Return whether a request may move now, and count the move; `assigned` requests are on nodes."""
        rate = max(MOVES_PER_SECOND * assigned, 1.0)  # moves per second
        self._left = min(self._left + (now - self._updated_at) * rate, rate)
        self._updated_at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
