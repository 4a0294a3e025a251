"""The processes of a cluster."""

from dataclasses import dataclass, replace
from pathlib import Path

from foreword.cluster.address import NodeAddress

NODE, TARGET, ROUTER = "node", "target", "router"

NODES_LIST, TARGETS_LIST = "@{lists}/nodes", "@{lists}/targets"
"""Where members that come and go are listed: arguments in which the folder is put when a member is started."""

ANYWHERE = ("0.0.0.0", "::")
"""Hosts that one listens on; others reach it by the name of its machine."""


@dataclass(frozen=True)
class Member:
    """One process."""

    name: str
    kind: str
    arguments: tuple[str, ...]  # of `foreword`
    address: str = ""  # where others find it
    cpus: float = 1.0  # that are kept for it, where somebody places it
    gpus: float = 0.0
    near: tuple[str, ...] = ()  # nodes that a target is placed beside
    asks: tuple[str, ...] = ()  # names and addresses of the nodes in a target's list; empty: all of them
    is_strict: bool = False  # on the same machine or not at all

    @property
    def is_target(self) -> bool:
        return self.kind == TARGET

    @property
    def url(self) -> str:
        """Of a target or a router."""
        return f"http://{self.address}"

    def command(self, lists: Path) -> list[str]:
        """Its arguments, with the lists in this folder."""
        known = {one: one.replace("{lists}", str(lists)) for one in (NODES_LIST, TARGETS_LIST)}
        return [known.get(argument, argument) for argument in self.arguments]

    def on(self, machine: str) -> "Member":
        """The same where it runs on a machine with this address: what listens anywhere is found there."""
        host, _, port = self.address.rpartition(":")
        if host.strip("[]") not in ANYWHERE:
            return self
        named = f"[{machine}]" if ":" in machine else machine
        return replace(self, address=f"{named}:{port}")

    def replica(self, number: int) -> "Member":
        """One more node like this one, at the next port; the first is the node itself."""
        if number == 1:
            return self
        own = NodeAddress.parse(self.address)
        path = f"{own.path}-{number}" if own.path else ""
        other = NodeAddress(own.host, own.port + number - 1, path)
        at = self.arguments.index("--listen") + 1
        arguments = (*self.arguments[:at], str(other), *self.arguments[at + 1 :])
        return replace(self, name=f"{self.name}-{number}", arguments=arguments, address=str(other))


def replica_number(name: str, of: str) -> int:
    """Which replica of a node this is; 0: none."""
    if name == of:
        return 1
    number = name.removeprefix(f"{of}-")
    return int(number) if name.startswith(f"{of}-") and number.isdecimal() else 0
