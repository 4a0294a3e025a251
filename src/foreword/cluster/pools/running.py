"""The members of a cluster: their description, the lists of their addresses, and a supervisor of their processes."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Protocol
from urllib.parse import quote

from foreword.cluster.address import NodeAddress

NODE, TARGET, ROUTER = "node", "target", "router"  # kinds of members

NODES_LIST, TARGETS_LIST = "@{lists}/nodes", "@{lists}/targets"
"""Arguments for the files with the addresses of nodes and targets; a member that starts gets a folder for `{lists}`."""

ANYWHERE = ("0.0.0.0", "::")
"""Hosts that listen on all interfaces; other members connect to the machine's address instead."""


@dataclass(frozen=True)
class Member:
    """One process of a cluster."""

    name: str
    kind: str  # NODE, TARGET or ROUTER
    arguments: tuple[str, ...]  # of the `foreword` command
    address: str = ""  # address to which others connect
    cpus: float = 1.0  # CPUs that Ray reserves
    gpus: float = 0.0  # GPUs that Ray reserves
    near: tuple[str, ...] = ()  # of a target: names of the nodes to place near it
    chosen_nodes: tuple[str, ...] = ()  # of a target: names of the nodes that it uses; empty: all
    is_strict: bool = False  # whether `near` nodes must be on the same machine

    @property
    def is_target(self) -> bool:
        return self.kind == TARGET

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def command(self, lists: Path) -> list[str]:
        """Return the member's command line, with the lists in this folder."""
        files = {name: name.replace("{lists}", str(lists)) for name in (NODES_LIST, TARGETS_LIST)}
        return [files.get(argument, argument) for argument in self.arguments]

    def on(self, machine: str) -> "Member":
        """Return the member on a machine with this address, which replaces wildcard hosts."""
        host, _, port = self.address.rpartition(":")
        if host.strip("[]") not in ANYWHERE:
            return self
        return replace(self, address=str(NodeAddress(machine, int(port))))

    def replica(self, number: int) -> "Member":
        """Return a copy of this node that listens `number` − 1 ports higher; replica 1 is the node itself."""
        if number == 1:
            return self
        first = NodeAddress.parse(self.address)
        path = f"{first.path}-{number}" if first.path else ""
        address = str(NodeAddress(first.host, first.port + number - 1, path))
        arguments = list(self.arguments)
        arguments[arguments.index("--listen") + 1] = address
        return replace(self, name=f"{self.name}-{number}", arguments=tuple(arguments), address=address)


def replica_number(name: str, node: str) -> int:
    """Return the number of a member among the replicas of a node, both given by name; 0: it is no replica."""
    if name == node:
        return 1
    number = name.removeprefix(f"{node}-")
    return int(number) if name.startswith(f"{node}-") and number.isdecimal() else 0


Listed = tuple[str, str, str]
"""(name, kind, address) of a member."""


def lists_of(member: Member, folder: Path) -> Path:
    """Return the folder of the lists that a member reads: a separate folder if it uses only some nodes."""
    return folder / f"of-{quote(member.name, safe='')}" if member.chosen_nodes else folder


def write_lists(folder: Path, members: Iterable[Listed], chosen_nodes: Collection[str] = ()) -> None:
    """Write the lists of nodes and targets.

    With `chosen_nodes`, the list of nodes has only these; an entry that contains a colon is the address of a node
    outside the cluster.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    nodes, targets = [], []
    for name, kind, address in members:
        if kind == TARGET:
            targets.append(address)
        elif kind == NODE and (not chosen_nodes or name in chosen_nodes):
            nodes.append(address)
    nodes += [address for address in chosen_nodes if ":" in address]
    _write(folder / "nodes", nodes)
    _write(folder / "targets", targets)


def _write(path: Path, addresses: Iterable[str]) -> None:
    """Write one address per line, atomically, if the file has changed."""
    text = "".join(f"{address}\n" for address in addresses)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(text, encoding="utf-8")
        new.replace(path)


_log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds before a restart: the first pause, which doubles with each restart, and the maximum."""

CALM_SECONDS = 60.0  # a member that ran for more seconds than this resets the pause
REFUSED = 2  # exit code of a member that refuses its arguments: a restart would fail again
CHECK_SECONDS = 0.5  # seconds between two checks of the members
_SLICE = 0.1  # seconds between two checks whether a stop was requested


class Stopping:
    """Flag that a stop was requested, by call or signal.

    It has no lock, unlike `threading.Event`: a signal handler that interrupts another one would wait for it forever.
    """

    def __init__(self) -> None:
        self._is_requested = False

    def listen(self) -> "Stopping":
        """Request the stop at SIGTERM and SIGINT; return this object."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.set())
        return self

    def set(self) -> None:
        self._is_requested = True

    def is_set(self) -> bool:
        return self._is_requested

    def wait(self, seconds: float = float("inf")) -> bool:
        """Wait until a stop is requested or the time is over; return whether a stop is requested."""
        until = time.monotonic() + seconds
        while not self._is_requested and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _SLICE))
        return self._is_requested


class Process(Protocol):
    """Interface of a running member's process."""

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def launch(member: Member, lists: Path) -> Process:
    """Start a member in a process that ends with this one."""
    tied = [sys.executable, "-m", "foreword.cluster.pools.tied", str(os.getpid())]
    return subprocess.Popen([*tied, *member.command(lists)], stdin=subprocess.DEVNULL)


@dataclass
class _Running:
    """A member and its process."""

    member: Member
    process: Process | None = None  # None: the member does not run now
    began: float = 0.0  # time of the last start
    pause: float = FIRST_PAUSE  # seconds before the next restart
    again_at: float = 0.0  # earliest time of the next start
    restarts: int = 0
    is_leaving: bool = False  # whether the member was dropped, so that its process ends
    is_refused: bool = False  # whether the member refused its arguments, so that it is not started again
    has_run: bool = False  # whether the member ran long enough to show that its arguments are valid

    @property
    def has_left(self) -> bool:
        """Whether the member was dropped and its process has ended."""
        return self.is_leaving and (self.process is None or self.process.poll() is not None)


@dataclass
class Pools:
    """Keeps all members running until stopped; one that refuses its arguments is not restarted."""

    members: Sequence[Member]
    start: Callable[[Member], Process]
    clock: Callable[[], float] = monotonic
    have_run: bool = False  # whether the members have run under an earlier supervisor; see `_Running.has_run`
    stopped: Stopping = field(default_factory=Stopping)
    _running: list[_Running] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._running = [_Running(member, has_run=self.have_run) for member in self.members]

    def restarts(self) -> dict[str, int]:
        """Return the number of restarts by name."""
        return {entry.member.name: entry.restarts for entry in self._running if not entry.is_leaving}

    def present(self) -> list[Member]:
        """Return the members that should run."""
        return [entry.member for entry in self._running if not entry.is_leaving]

    def refused(self) -> set[str]:
        """Return the names of members that refused their arguments."""
        return {entry.member.name for entry in self._running if entry.is_refused}

    def add(self, member: Member) -> None:
        """Add a member, which the next check starts."""
        self._running.append(_Running(member))

    def drop(self, name: str) -> None:
        """Remove a member and let its process end."""
        for entry in self._running:
            if entry.member.name == name and not entry.is_leaving:
                entry.is_leaving = True
                if entry.process is not None:
                    entry.process.terminate()

    def check_members(self) -> None:
        """Remove members that have left, record processes that have ended, and start members that are due."""
        now = self.clock()
        self._running = [entry for entry in self._running if not entry.has_left]
        for entry in self._running:
            if entry.is_leaving or entry.is_refused:
                continue
            if entry.process is not None and (code := entry.process.poll()) is not None:
                self._ended(entry, code, now)
            if entry.process is None and now >= entry.again_at and not entry.is_refused:
                entry.process, entry.began = self.start(entry.member), now
                _log.info("%s is started", entry.member.name)

    def _ended(self, entry: _Running, code: int, now: float) -> None:
        """Record that a member's process has ended, and when to start it again; `code` is the exit code."""
        entry.process = None
        if now - entry.began > CALM_SECONDS:
            entry.pause, entry.has_run = FIRST_PAUSE, True
        if code == REFUSED and not entry.has_run:
            entry.is_refused = True
            _log.error("%s refused its options (see above) and is not started again", entry.member.name)
            return
        entry.again_at = now + entry.pause
        _log.error("%s has ended (exit code %s); restarting in %g s", entry.member.name, code, entry.pause)
        entry.pause = min(2 * entry.pause, LONGEST_PAUSE)
        entry.restarts += 1

    def run(self, and_then: Callable[[], None] = lambda: None) -> None:
        """Check the members and call `and_then` periodically until `stopped` is set; then end all members."""
        try:
            while not self.stopped.is_set():
                self.check_members()
                and_then()
                self.stopped.wait(CHECK_SECONDS)
        finally:
            self.close()

    def close(self, timeout: float = 45.0) -> None:
        """End routers, then targets, then nodes; kill those that do not end in `timeout` seconds."""
        for kind in (ROUTER, TARGET, NODE):
            ending = [entry for entry in self._running if entry.member.kind == kind]
            processes = [entry.process for entry in ending if entry.process is not None]
            for process in processes:
                process.terminate()
            for process in processes:
                try:
                    process.wait(timeout)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            for entry in ending:
                entry.process = None
