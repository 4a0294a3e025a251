"""Runs the members of a cluster on this machine, logs their changes, and writes the state file."""

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
    machine: str = ""  # address of the member's machine; empty: this machine
    is_refused: bool = False  # whether the member refused its arguments, so that it is not started again


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
    """Return the replica numbers of a node that are in use."""
    return {replica_number(name, node) for name in fleet.names()} - {0}


class LocalFleet:
    """All members as processes of this machine."""

    def __init__(
        self, cluster: ClusterConfig, lists: Path, start: Callable[[Member, Path], Process] = launch
    ) -> None:
        """`lists` is the folder of the lists of members, which `start` receives as well."""
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
            MemberStatus(
                member.name,
                member.kind,
                member.address,
                restarts[member.name],
                is_refused=member.name in refused,
            )
            for member in self._pools.present()
        ]

    def names(self) -> list[str]:
        return [member.name for member in self._pools.present()]

    def add(self, member: Member) -> None:
        self._pools.add(member)
        self._list()

    def drop(self, name: str) -> None:
        self._pools.drop(name)
        self._list()

    def _list(self) -> None:
        """Write the lists of all members, and separate lists for targets that use only some nodes."""
        present = self._pools.present()
        listed = [(member.name, member.kind, member.address) for member in present]
        write_lists(self._lists, listed)
        for member in present:
            if member.chosen_nodes:
                write_lists(lists_of(member, self._lists), listed, member.chosen_nodes)


_log = logging.getLogger(__name__)


class MemberLog:
    """Logs each change of a member once: start, restart, refusal."""

    def __init__(self) -> None:
        self._known: dict[str, MemberStatus] = {}  # last status by name

    def log_changes(self, members: Sequence[MemberStatus]) -> None:
        for member in members:
            name, before = member.name, self._known.get(member.name)
            self._known[name] = member
            if before is None or before.machine != member.machine:
                _log.info("%s is started on %s", name, member.machine)
            elif member.restarts > before.restarts:
                _log.warning("%s has ended and is started again (%d times so far)", name, member.restarts)
            if member.is_refused and (before is None or not before.is_refused):
                _log.error("%s refused its options and is not started again; its log has the reason", name)


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
        state = {"pid": os.getpid(), "members": [asdict(member) for member in members]}
        if state != self._written:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(state), encoding="utf-8")
            new.replace(self._path)
            self._written = state

    def forget(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)

    def members(self) -> list[MemberStatus]:
        """Return the members in the file; empty if there is no file."""
        return [MemberStatus(**member) for member in self._read().get("members", ())]

    def watcher(self) -> int | None:
        """Return the supervisor's process id; None: not running."""
        pid = self._read().get("pid")
        return pid if isinstance(pid, int) and _is_up(pid) else None

    def stop(self) -> bool:
        """Send the supervisor SIGTERM, so that it ends all members; return False if no supervisor is running."""
        pid = self.watcher()
        if pid is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        return True

    def _read(self) -> dict[str, Any]:
        """Return the contents of the file; empty if it cannot be read."""
        try:
            state: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return state


def _is_up(pid: int) -> bool:
    """Return whether the process with this id runs `cluster up`; another one may have the id of an ended supervisor."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        command = [] if Path("/proc").is_dir() else _reported_by_ps(pid)
    return b"cluster" in command and b"up" in command


def _reported_by_ps(pid: int) -> list[bytes]:
    """Return a process's command line on systems without /proc (macOS)."""
    command = ["ps", "-p", str(pid), "-o", "args="]
    return subprocess.run(command, capture_output=True, check=False).stdout.split()
