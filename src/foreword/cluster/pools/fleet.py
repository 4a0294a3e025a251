"""The members of a cluster on this machine, without Ray; and what all kinds of fleets can do."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from foreword.cluster.pools.file import Cluster
from foreword.cluster.pools.lists import lists_of, write_lists
from foreword.cluster.pools.members import Member, replica_number
from foreword.cluster.pools.running import Pools, Process, launch
from foreword.cluster.stopping import Stopping


@dataclass(frozen=True)
class MemberTold:
    """A member as whoever watches it knows it."""

    name: str
    kind: str
    address: str
    restarts: int = 0
    machine: str = ""  # where it was placed; empty: here
    is_refused: bool = False  # it cannot use what it was given, and was not started again


class Fleet(Protocol):
    """Members that run, and nodes of which there can be more or fewer."""

    def members(self) -> list[MemberTold]:
        """Those that run."""
        ...

    def names(self) -> Collection[str]:
        """Those that are meant to run."""
        ...

    def add(self, member: Member) -> None: ...

    def drop(self, name: str) -> None:
        """End a node: it tells its targets first."""
        ...


def resize(fleet: Fleet, node: Member, size: int) -> None:
    """Have so many replicas of a node: those with the lowest numbers."""
    have = numbers(fleet, node.name)
    for number in [number for number in range(1, size + 1) if number not in have][: max(size - len(have), 0)]:
        fleet.add(node.replica(number))
    for number in sorted(have, reverse=True)[: max(len(have) - size, 0)]:
        fleet.drop(node.replica(number).name)


def numbers(fleet: Fleet, node: str) -> set[int]:
    """Which replicas of a node there are."""
    return {number for name in fleet.names() if (number := replica_number(name, node))}


class LocalFleet:
    """All members as processes of this machine."""

    def __init__(
        self, cluster: Cluster, lists: Path, start: Callable[[Member, Path], Process] = launch
    ) -> None:
        self._lists = lists
        self._pools = Pools(cluster.members, lambda member: start(member, lists_of(member, lists)))
        self._list()
        if cluster.scale is not None:
            resize(self, cluster.member(cluster.scale.node), cluster.scale.least)

    @property
    def stopped(self) -> Stopping:
        return self._pools.stopped

    def run(self, and_then: Callable[[], None]) -> None:
        """Keep them running until `stopped` is set."""
        self._pools.run(and_then)

    def members(self) -> list[MemberTold]:
        restarts, refused = self._pools.restarts(), self._pools.refused()
        return [
            MemberTold(one.name, one.kind, one.address, restarts[one.name], "", one.name in refused)
            for one in self._pools.present()
        ]

    def names(self) -> list[str]:
        return [one.name for one in self._pools.present()]

    def add(self, member: Member) -> None:
        self._pools.add(member)
        self._list()

    def drop(self, name: str) -> None:
        self._pools.drop(name)
        self._list()

    def _list(self) -> None:
        present = self._pools.present()
        listed = [(one.name, one.kind, one.address) for one in present]
        write_lists(self._lists, listed)
        for member in present:
            if member.asks:
                write_lists(lists_of(member, self._lists), listed, member.asks)
