"""What `foreword cluster up` leaves for `status` and `down`: who watches the members, and where these are."""

import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from platformdirs import user_state_path

from foreword.cluster.pools.fleet import MemberTold


class ClusterState:
    """Of the cluster that a file describes, on this machine."""

    def __init__(self, file: Path, folder: Path | None = None) -> None:
        name = sha256(str(file.resolve()).encode()).hexdigest()[:16]
        self.folder = (folder or user_state_path("foreword") / "clusters") / name
        self._path = self.folder / "state.json"
        self._written: object = None

    def write(self, members: Sequence[MemberTold]) -> None:
        """Whenever something is new."""
        told = {"pid": os.getpid(), "members": [asdict(one) for one in members]}
        if told != self._written:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(told), encoding="utf-8")
            new.replace(self._path)
            self._written = told

    def forget(self) -> None:
        with suppress(FileNotFoundError):
            self._path.unlink()

    def members(self) -> list[MemberTold]:
        """Empty: nobody watches over the cluster here."""
        return [MemberTold(**one) for one in self._told().get("members", ())]

    def watcher(self) -> int | None:
        """The process that watches over it; None: there is none."""
        pid = self._told().get("pid")
        return pid if isinstance(pid, int) and _is_up(pid) else None

    def stop(self) -> bool:
        """Ask it to end everything; False if there is none."""
        pid = self.watcher()
        if pid is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        return True

    def _told(self) -> dict[str, Any]:
        try:
            told: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return told


def _is_up(pid: int) -> bool:
    """Whether that is still a `cluster up`: a number may be another process's by now."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"cluster" in command and b"up" in command
