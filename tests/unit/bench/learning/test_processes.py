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

MEMBER = """
import subprocess, sys
depth = int(sys.argv[1])
child = None
if depth:
    command = [sys.executable, __file__, str(depth - 1)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    print(child.pid, flush=True)
input()
if child is not None:
    child.communicate(b"end")
"""


def state(process_id: int) -> str:
    return Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


@pytest.fixture
def family(tmp_path: Path) -> Iterator[list[int]]:
    """A process, its child and its grandchild, each in a session of its own."""
    (tmp_path / "member.py").write_text(MEMBER, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "member.py"), "2"]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    members = [parent.pid, *(int(parent.stdout.readline()) for _ in range(2))]
    yield members
    for member in members:
        os.kill(member, signal.SIGCONT)
    parent.communicate(b"end")


def test_all_descendants_stop_and_go_on(family: list[int]):
    with stopped(family[0]):
        assert [state(member) for member in family] == ["T", "T", "T"]
    wait_until(lambda: all(state(member) != "T" for member in family))


def test_what_was_stopped_before_stays_so(family: list[int]):
    parent, paused, other = family
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
