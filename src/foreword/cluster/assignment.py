"""Assigns requests to nodes: near, not overloaded, and the same one as long as possible."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

LOAD_BOUND = 1.25
"""No node has more than this many times its share of the requests."""

MOVES_PER_SECOND = 0.05
"""Part of the requests that may get another home in a second: each has its text read anew there."""

LABELS = ("host", "rack", "zone")
"""What nodes and targets may have in common, the nearest first."""


@dataclass(frozen=True)
class Place:
    """A node that could be a request's home."""

    name: str
    capacity: int  # requests
    homes: int  # requests of this target that it has
    distance: int = 0  # see `distance`


def distance(ours: Mapping[str, str], theirs: Mapping[str, str]) -> int:
    """0: the same host; then the same rack, the same zone, elsewhere."""
    for steps, label in enumerate(LABELS):
        if ours.get(label) and ours.get(label) == theirs.get(label):
            return steps
    return len(LABELS)


def choose_home(request: int, places: Sequence[Place]) -> str | None:
    """A node by rendezvous hash, of the nearest that have room; None: none has.

    Whoever comes or goes, other requests keep their choice; heavier nodes are chosen more often.
    """
    for steps in sorted({place.distance for place in places}):
        near = [place for place in places if place.distance == steps and place.capacity > 0]
        total, capacity = sum(place.homes for place in near) + 1, sum(place.capacity for place in near)
        free = [
            place
            for place in near
            if place.homes < min(place.capacity, math.ceil(LOAD_BOUND * total * place.capacity / capacity))
        ]
        if free:
            return max(free, key=lambda place: _score(request, place)).name
    return None


def _score(request: int, place: Place) -> float:
    digest = blake2b(f"{request}/{place.name}".encode(), digest_size=8).digest()
    share = (int.from_bytes(digest, "big") + 0.5) / 2**64
    return -place.capacity / math.log(share)


class MoveBudget:
    """How many requests may get another home now."""

    def __init__(self, now: float) -> None:
        self._left = 1.0
        self._at = now

    def take(self, now: float, homes: int) -> bool:
        """Whether one more may move."""
        rate = max(MOVES_PER_SECOND * homes, 1.0)
        self._left = min(self._left + (now - self._at) * rate, rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
