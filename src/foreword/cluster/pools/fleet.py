"""The members of a cluster on this machine, their log lines, and the state file."""

import json
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from platformdirs import user_state_path

from foreword.cluster.pools.file import ClusterConfig
from foreword.cluster.pools.running import (
    Member,
    Pools,
    Process,
    Stopping,
    launch,
    lists_of,
    replica_number,
    write_lists,
)


@dataclass(frozen=True)
class MemberStatus:
    """State of a member."""

    name: str
    kind: str
    address: str
    restarts: int = 0
    machine: str = ""  # address of its machine; empty: this machine
    is_refused: bool = False  # whether it refused its arguments, so that it is not started again


class MemberFleet(Protocol):
    """Running members, and nodes that can be added or removed."""

    def members(self) -> list[MemberStatus]:
        """Return the running members."""

    def names(self) -> Collection[str]:
        """Return the names of all members, also of those that do not run yet."""

    def add(self, member: Member) -> None:
        """Start one more node."""

    def drop(self, name: str) -> None:
        """End a node."""


def resize(fleet: MemberFleet, node: Member, size: int) -> None:
    """Set the number of replicas of a node: start those with the lowest free numbers, or end the highest."""
    running = numbers(fleet, node.name)
    free = [number for number in range(1, size + 1) if number not in running]
    for number in free[: max(size - len(running), 0)]:
        fleet.add(node.replica(number))
    for number in sorted(running, reverse=True)[: max(len(running) - size, 0)]:
        fleet.drop(node.replica(number).name)


def numbers(fleet: MemberFleet, node: str) -> set[int]:
    """Return the numbers of a node's replicas."""
    return {number for name in fleet.names() if (number := replica_number(name, node))}


class LocalFleet:
    """All members as processes of this machine."""

    def __init__(
        self, cluster: ClusterConfig, lists: Path, start: Callable[[Member, Path], Process] = launch
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
        """Supervise the members until `stopped` is set."""
        self._pools.run(and_then)

    def members(self) -> list[MemberStatus]:
        restarts, refused = self._pools.restarts(), self._pools.refused()
        return [
            MemberStatus(one.name, one.kind, one.address, restarts[one.name], "", one.name in refused)
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
        """Write the lists of all members, and those of targets that use only some nodes."""
        present = self._pools.present()
        listed = [(one.name, one.kind, one.address) for one in present]
        write_lists(self._lists, listed)
        for member in present:
            if member.chosen_nodes:
                write_lists(lists_of(member, self._lists), listed, member.chosen_nodes)


_log = logging.getLogger(__name__)


class MemberLog:
    """Logs each change once: start, restart, refusal."""

    def __init__(self) -> None:
        self._known: dict[str, MemberStatus] = {}

    def log_changes(self, members: Sequence[MemberStatus]) -> None:
        for one in members:
            before = self._known.get(one.name)
            self._known[one.name] = one
            if before is None or before.machine != one.machine:
                _log.info("%s is started on %s", one.name, one.machine)
            elif one.restarts > before.restarts:
                _log.warning("%s has ended and is started again (%d times so far)", one.name, one.restarts)
            if one.is_refused and (before is None or not before.is_refused):
                _log.error(
                    "%s refused its options and is not started again; its log has the reason", one.name
                )


class ClusterState:
    """State file of a cluster on this machine."""

    def __init__(self, file: Path, folder: Path | None = None) -> None:
        """`file` is the cluster file; `folder` replaces the user's folder for the states of all clusters."""
        name = sha256(str(file.resolve()).encode()).hexdigest()[:16]
        self.folder = (folder or user_state_path("foreword") / "clusters") / name
        self._path = self.folder / "state.json"
        self._written: object = None  # what this process wrote last

    def write(self, members: Sequence[MemberStatus]) -> None:
        """Write the members and this process's id if they have changed."""
        reported = {"pid": os.getpid(), "members": [asdict(one) for one in members]}
        if reported != self._written:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(reported), encoding="utf-8")
            new.replace(self._path)
            self._written = reported

    def forget(self) -> None:
        """Remove the file."""
        with suppress(FileNotFoundError):
            self._path.unlink()

    def members(self) -> list[MemberStatus]:
        """Return the members; empty if no process supervises this cluster."""
        return [MemberStatus(**one) for one in self._read().get("members", ())]

    def watcher(self) -> int | None:
        """Return the supervisor's process id; None: not running."""
        pid = self._read().get("pid")
        return pid if isinstance(pid, int) and _is_up(pid) else None

    def stop(self) -> bool:
        """Send the supervisor SIGTERM, so that it ends all members; return False if there is none."""
        pid = self.watcher()
        if pid is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        return True

    def _read(self) -> dict[str, Any]:
        try:
            reported: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return reported


def _is_up(pid: int) -> bool:
    """Return whether the process with this id is a `cluster up`: ids of ended processes are used again."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        command = [] if Path("/proc").is_dir() else _reported_by_ps(pid)
    return b"cluster" in command and b"up" in command


def _reported_by_ps(pid: int) -> list[bytes]:
    """Return a process's command line on systems without /proc (macOS)."""
    command = ["ps", "-p", str(pid), "-o", "args="]
    return subprocess.run(command, capture_output=True, check=False).stdout.split()
