"""The processes of a cluster, and the files that list their addresses."""

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

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


Listed = tuple[str, str, str]
"""Name, kind and address of a member."""


def lists_of(member: Member, folder: Path) -> Path:
    """Where its lists are: in a folder of its own if it asks some of the nodes only."""
    return folder / f"of-{quote(member.name, safe='')}" if member.asks else folder


def write_lists(folder: Path, members: Iterable[Listed], asks: Collection[str] = ()) -> None:
    """The nodes that are asked, and the targets; a file changes as a whole or not at all."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    known = list(members)
    nodes = {name: address for name, kind, address in known if kind == NODE}
    if asks:
        elsewhere = [one for one in asks if ":" in one]
        nodes = {name: address for name, address in nodes.items() if name in asks}
        nodes |= {address: address for address in elsewhere}
    _write(folder / "nodes", nodes.values())
    _write(folder / "targets", [address for _, kind, address in known if kind == TARGET])


def _write(path: Path, addresses: Iterable[str]) -> None:
    text = "".join(f"{address}\n" for address in addresses)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(text, encoding="utf-8")
        new.replace(path)
