"""Threads of the CPU kernels: how many there may be, and what happens where they cannot run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foreword.errors import RequestError
from foreword.kernels.native import choose_threads
from helpers.native import needs_native

IMPORTS = "import os, resource, numpy as np; from foreword.kernels import _native\n"

WITHOUT_ROOM_FOR_STACKS = """
mapped = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (mapped + (256 << 20), resource.RLIM_INFINITY))
"""


def run_script(script: str) -> str:
    """What a fresh interpreter prints, within a limit: a hang is a failure."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS + script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_more_threads_than_a_machine_can_use_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert choose_threads(32) == 32
    for count in ("33", "2000", "100000", "9" * 30):
        monkeypatch.setenv("FOREWORD_THREADS", count)
        with pytest.raises(RequestError, match=rf"at most 32 on this machine, not {count}$"):
            choose_threads()


@needs_native
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="address space is bounded on Linux")
@pytest.mark.parametrize(
    "build",
    [
        "_native.Sampler(1000)",
        "_native.PackedMatrix.round_floats(_native.Arena(), np.ones((8, 64), np.float32), 64, True, isa, 1000)",
    ],
    ids=["sampler", "packing"],
)
def test_a_thread_that_cannot_be_started_is_an_error_and_leaves_none_behind(build: str):
    script = f"""
isa = _native.instruction_sets()[0]
before = len(os.listdir("/proc/self/task"))
{WITHOUT_ROOM_FOR_STACKS}
try:
    {build}
except RuntimeError as error:
    print(error)
print(len(os.listdir("/proc/self/task")) - before)
"""
    message, left = run_script(script).splitlines()
    assert "of 1000 threads could be started" in message
    assert left == "0"
