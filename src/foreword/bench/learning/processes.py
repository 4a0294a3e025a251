"""Stops a server's processes for a while, so that they take no time from another server that is measured."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

from foreword.errors import ForewordError

LONGEST_STOP = 30.0  # seconds that a process may take to stop; it may be writing to a disk


@contextmanager
def stopped(process_id: int) -> Iterator[None]:
    """Stop a process and its descendants within the block; those that were stopped before stay stopped after it."""
    if not Path("/proc/self/task").is_dir():
        raise ForewordError("processes are stopped by their entries in /proc; run this benchmark on Linux")
    halted: list[int] = []
    try:
        # Parents first: afterwards they neither start a child nor let one go on.
        for member in _family(process_id):
            if not _is_stopped(member):
                halted.append(member)
                _stop(member)
        yield
    finally:
        for member in halted:
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGCONT)


def _family(process_id: int) -> Iterator[int]:
    """Yield a process and its descendants, each before its children."""
    yield process_id
    for task in Path(f"/proc/{process_id}/task").glob("*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            for child in (task / "children").read_text(encoding="ascii").split():
                yield from _family(int(child))


def _stop(process_id: int) -> None:
    """Stop a process; return when it runs no more."""
    os.kill(process_id, signal.SIGSTOP)
    deadline = monotonic() + LONGEST_STOP
    while not _is_stopped(process_id):
        if monotonic() > deadline:
            raise ForewordError(f"process {process_id} of the server could not be stopped; start it anew")
        sleep(0.001)


def _is_stopped(process_id: int) -> bool:
    """Return whether a process is stopped, or has ended."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return True
    # The process name is in parentheses and may contain spaces.
    return stat.rpartition(")")[2].split()[0] in "TZX"
