"""A cluster member in a Ray actor, and the registry of members."""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import mkdtemp
from time import monotonic
from typing import Any

from foreword.cluster.pools.fleet import MemberStatus
from foreword.cluster.pools.members import Member, write_lists
from foreword.cluster.pools.running import CHECK_SECONDS, Pools, Process, launch

SILENT_SECONDS = 10.0
"""Seconds without a message after which a member counts as gone."""


class MemberRegistry:
    """Registry that members update periodically, so that a restarted registry soon knows all."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._reports: dict[str, tuple[dict[str, Any], float]] = {}  # by name: report and its time

    def report(self, reported: dict[str, Any]) -> list[dict[str, Any]]:
        """Register a member; return all members."""
        self._reports[reported["name"]] = reported, self._clock()
        return self.members()

    def leave(self, name: str) -> None:
        """Remove a member that is leaving."""
        self._reports.pop(name, None)

    def members(self) -> list[dict[str, Any]]:
        now = self._clock()
        return [reported for reported, at in self._reports.values() if now - at <= SILENT_SECONDS]


_log = logging.getLogger(__name__)

Report = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Reports a member to the registry and returns all members."""

AUTH_VARIABLE = "RAY_AUTH_MODE"


class MemberActor:
    """Restarts the member's process when it ends, like the supervisor on one machine.

    Ray restarts the actor when it or its machine ends; the process ends with it. A single thread does everything,
    because the process is tied to it.
    """

    def __init__(
        self,
        member: Member,
        machine: str,
        report: Report,
        start: Callable[[Member, Path], Process] = launch,
        has_run: bool = False,
    ) -> None:
        """`has_run`: an earlier actor ran it, whose process may still be ending."""
        self._member = member.on(machine)
        self._machine = machine
        self._report = report
        self._lists = Path(mkdtemp(prefix="foreword-"))
        write_lists(self._lists, [])
        self._pools = Pools([member], lambda one: start(one, self._lists), have_run=has_run)
        self._thread = threading.Thread(target=self._pools.run, args=(self.report_status,), name=member.name)

    def run(self) -> None:
        """Run from now on."""
        self._thread.start()

    def report_status(self) -> None:
        """Report to the registry, and write the lists."""
        with suppress(Exception):  # the registry is restarting
            listed = [(one["name"], one["kind"], one["address"]) for one in self._report(self.reported())]
            write_lists(self._lists, listed, self._member.chosen_nodes)

    def reported(self) -> dict[str, Any]:
        member = self._member
        restarts, is_refused = self._pools.restarts().get(member.name, 0), bool(self._pools.refused())
        reported = MemberStatus(member.name, member.kind, member.address, restarts, self._machine, is_refused)
        return asdict(reported)

    def is_guarded(self) -> bool:
        """Whether Ray requires a token here."""
        return os.environ.get(AUTH_VARIABLE, "").lower() == "token"

    def stop(self) -> None:
        """End the process and wait for it."""
        self._pools.stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        for path in self._lists.iterdir():
            path.unlink()
        self._lists.rmdir()


MAX_REPLY_SECONDS = 4 * CHECK_SECONDS
"""Timeout of the registry in seconds."""
