"""A server's processes are stopped for a while, and no other state of theirs is changed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from foreword.bench.learning import processes
from foreword.bench.learning.processes import stopped
from foreword.errors import ForewordError
from helpers.waiting import wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no /proc")

PARENT = """
import subprocess, sys
children = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
            for _ in range(2)]
print(*(child.pid for child in children), flush=True)
input()
for child in children:
    child.communicate(b"end")
"""


def state(process_id: int) -> str:
    return Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


@pytest.fixture
def family() -> Iterator[tuple[int, list[int]]]:
    """A process, and two children in sessions of their own."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    children = [int(word) for word in parent.stdout.readline().split()]
    yield parent.pid, children
    for member in children:
        os.kill(member, signal.SIGCONT)
    parent.communicate(b"end\\n")


def test_all_descendants_stop_and_go_on(family: tuple[int, list[int]]):
    parent, children = family
    with stopped(parent):
        assert all(state(member) == "T" for member in (parent, *children))
    wait_until(lambda: all(state(member) != "T" for member in (parent, *children)))


def test_what_was_stopped_before_stays_so(family: tuple[int, list[int]]):
    parent, (paused, other) = family
    os.kill(paused, signal.SIGSTOP)
    wait_until(lambda: state(paused) == "T")
    with pytest.raises(KeyError), stopped(parent):
        raise KeyError
    wait_until(lambda: state(other) != "T")
    assert state(paused) == "T"


def test_without_proc_it_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes.Path, "is_dir", lambda _: False)
    with pytest.raises(ForewordError, match="run this benchmark on Linux"), stopped(os.getpid()):
        pass
