"""Starts the members of a cluster on this machine and restarts those that end."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Protocol

from foreword.cluster.pools.members import NODE, ROUTER, TARGET, Member

_log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Initial and maximum seconds before a restart; doubles each time."""

CALM_SECONDS = 60.0
"""Seconds after which a running member resets its pause."""

REFUSED = 2
"""Exit code of a member that refuses its arguments: a restart would fail again."""

CHECK_SECONDS = 0.5


_SLICE = 0.1


class Stopping:
    """Whether a stop was requested, by call or signal.

    A signal handler may interrupt itself, and would deadlock on the lock of an `Event`. So there is no lock.
    """

    def __init__(self) -> None:
        self._is_asked = False

    def listen(self) -> "Stopping":
        """Handle SIGTERM and SIGINT, repeatedly."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.set())
        return self

    def set(self) -> None:
        self._is_asked = True

    def is_set(self) -> bool:
        return self._is_asked

    def wait(self, seconds: float = float("inf")) -> bool:
        """Wait until a stop is requested or the time is over; return whether it is."""
        until = time.monotonic() + seconds
        while not self._is_asked and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _SLICE))
        return self._is_asked


class Process(Protocol):
    """Interface of a running member's process."""

    def poll(self) -> int | None:
        """Return the exit code; None: running."""
        ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def launch(member: Member, lists: Path) -> Process:
    """Start a member in a process that ends with this one."""
    tied = [sys.executable, "-m", "foreword.cluster.pools.tied", str(os.getpid())]
    return subprocess.Popen([*tied, *member.command(lists)], stdin=subprocess.DEVNULL)


@dataclass
class _Running:
    member: Member
    process: Process | None = None
    began: float = 0.0
    pause: float = FIRST_PAUSE
    again_at: float = 0.0
    restarts: int = 0
    is_leaving: bool = False
    is_refused: bool = False
    has_run: bool = False  # long enough to show that its arguments are valid


@dataclass
class Pools:
    """Keeps all members running until stopped; one that refuses its arguments is not restarted."""

    members: Sequence[Member]
    start: Callable[[Member], Process]
    clock: Callable[[], float] = monotonic
    have_run: bool = False  # under an earlier supervisor
    stopped: Stopping = field(default_factory=Stopping)
    _running: list[_Running] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._running = [_Running(member, has_run=self.have_run) for member in self.members]

    def restarts(self) -> dict[str, int]:
        """Return the number of restarts by name."""
        return {one.member.name: one.restarts for one in self._running if not one.is_leaving}

    def present(self) -> list[Member]:
        """Return the members that should run."""
        return [one.member for one in self._running if not one.is_leaving]

    def refused(self) -> set[str]:
        """Return the names of members that are not restarted."""
        return {one.member.name for one in self._running if one.is_refused}

    def add(self, member: Member) -> None:
        """Add a member, started at the next check."""
        self._running.append(_Running(member))

    def drop(self, name: str) -> None:
        """End a member."""
        for one in self._running:
            if one.member.name == name and not one.is_leaving:
                one.is_leaving = True
                if one.process is not None:
                    one.process.terminate()

    def check_members(self) -> None:
        """Start members that do not run and are due."""
        now = self.clock()
        self._running = [one for one in self._running if not (one.is_leaving and _has_ended(one))]
        for one in self._running:
            if one.is_leaving or one.is_refused:
                continue
            if one.process is not None and (code := one.process.poll()) is not None:
                self._ended(one, code, now)
            if one.process is None and now >= one.again_at and not one.is_refused:
                one.process, one.began = self.start(one.member), now
                _log.info("%s is started", one.member.name)

    def _ended(self, one: _Running, code: int, now: float) -> None:
        one.process = None
        if now - one.began > CALM_SECONDS:
            one.pause, one.has_run = FIRST_PAUSE, True
        if code == REFUSED and not one.has_run:
            one.is_refused = True
            _log.error("%s refused its options (see above) and is not started again", one.member.name)
            return
        one.again_at = now + one.pause
        _log.error("%s has ended (exit code %s); restarting in %g s", one.member.name, code, one.pause)
        one.pause = min(2 * one.pause, LONGEST_PAUSE)
        one.restarts += 1

    def run(self, and_then: Callable[[], None] = lambda: None) -> None:
        """Supervise until `stopped` is set; then end routers, targets and nodes, in this order."""
        try:
            while not self.stopped.is_set():
                self.check_members()
                and_then()
                self.stopped.wait(CHECK_SECONDS)
        finally:
            self.close()

    def close(self, timeout: float = 45.0) -> None:
        """End all members; kill those that do not end in time."""
        for kind in (ROUTER, TARGET, NODE):
            ending = [one for one in self._running if one.member.kind == kind and one.process is not None]
            for one in ending:
                assert one.process is not None
                one.process.terminate()
            for one in ending:
                assert one.process is not None
                try:
                    one.process.wait(timeout)
                except subprocess.TimeoutExpired:
                    one.process.kill()
                    one.process.wait()
                one.process = None


def _has_ended(one: _Running) -> bool:
    return one.process is None or one.process.poll() is not None
