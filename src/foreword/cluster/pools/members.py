"""The processes of a cluster, and the files that list their addresses."""

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from foreword.cluster.address import NodeAddress

NODE, TARGET, ROUTER = "node", "target", "router"

NODES_LIST, TARGETS_LIST = "@{lists}/nodes", "@{lists}/targets"
"""Arguments that refer to the lists of members; the folder is filled in at the start."""

ANYWHERE = ("0.0.0.0", "::")
"""Wildcard hosts to listen on; others connect to the machine's name."""


@dataclass(frozen=True)
class Member:
    """One process of a cluster."""

    name: str
    kind: str
    arguments: tuple[str, ...]  # of the `foreword` command
    address: str = ""  # public address
    cpus: float = 1.0  # reserved by a scheduler
    gpus: float = 0.0
    near: tuple[str, ...] = ()  # nodes to place a target next to
    chosen_nodes: tuple[str, ...] = ()  # nodes in a target's list; empty: all
    is_strict: bool = False  # same machine required

    @property
    def is_target(self) -> bool:
        return self.kind == TARGET

    @property
    def url(self) -> str:
        """URL of a target or router."""
        return f"http://{self.address}"

    def command(self, lists: Path) -> list[str]:
        """Return its command line, with the lists in this folder."""
        known = {one: one.replace("{lists}", str(lists)) for one in (NODES_LIST, TARGETS_LIST)}
        return [known.get(argument, argument) for argument in self.arguments]

    def on(self, machine: str) -> "Member":
        """Return the member on a machine with this address, which replaces wildcard hosts."""
        host, _, port = self.address.rpartition(":")
        if host.strip("[]") not in ANYWHERE:
            return self
        named = f"[{machine}]" if ":" in machine else machine
        return replace(self, address=f"{named}:{port}")

    def replica(self, number: int) -> "Member":
        """Return another node like this one at the next port; replica 1 is the node itself."""
        if number == 1:
            return self
        own = NodeAddress.parse(self.address)
        path = f"{own.path}-{number}" if own.path else ""
        other = NodeAddress(own.host, own.port + number - 1, path)
        at = self.arguments.index("--listen") + 1
        arguments = (*self.arguments[:at], str(other), *self.arguments[at + 1 :])
        return replace(self, name=f"{self.name}-{number}", arguments=arguments, address=str(other))


def replica_number(name: str, of: str) -> int:
    """Return a replica's number; 0: not a replica of this node."""
    if name == of:
        return 1
    number = name.removeprefix(f"{of}-")
    return int(number) if name.startswith(f"{of}-") and number.isdecimal() else 0


Listed = tuple[str, str, str]
"""Name, kind and address of a member."""


def lists_of(member: Member, folder: Path) -> Path:
    """Return the folder of its lists; its own if it uses only some nodes."""
    return folder / f"of-{quote(member.name, safe='')}" if member.chosen_nodes else folder


def write_lists(folder: Path, members: Iterable[Listed], chosen_nodes: Collection[str] = ()) -> None:
    """Write the lists of nodes and targets atomically."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    known = list(members)
    nodes = {name: address for name, kind, address in known if kind == NODE}
    if chosen_nodes:
        elsewhere = [one for one in chosen_nodes if ":" in one]
        nodes = {name: address for name, address in nodes.items() if name in chosen_nodes}
        nodes |= {address: address for address in elsewhere}
    _write(folder / "nodes", nodes.values())
    _write(folder / "targets", [address for _, kind, address in known if kind == TARGET])


def _write(path: Path, addresses: Iterable[str]) -> None:
    text = "".join(f"{address}\n" for address in addresses)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(text, encoding="utf-8")
        new.replace(path)
