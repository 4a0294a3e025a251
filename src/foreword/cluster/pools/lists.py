"""Files with the addresses of members, for those that read them again and again."""

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from urllib.parse import quote

from foreword.cluster.pools.members import NODE, TARGET, Member

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
