"""What only Linux has, has a fallback on macOS. Here the system's name and calls are replaced."""

import os
import re
import resource
import runpy
import signal
import socket
import sys
from pathlib import Path

import pytest

from foreword.backends.cpu import resident
from foreword.bench import peers, server_overhead
from foreword.cli.bench import common
from foreword.cluster.pools import fleet, tied
from foreword.errors import ForewordError
from foreword.kernels import native
from foreword.server.router import app

ROOT = Path(__file__).parents[2]
LINUX_ONLY = re.compile(
    r"sched_[gs]etaffinity|MADV_\w+|/proc\b|/dev/shm|memfd_create|prctl\(|epoll|eventfd|signalfd|pidfd|inotify|mremap"
    r"|MAP_POPULATE|MAP_HUGETLB|getauxval\(|asm/hwcap|TCP_KEEPIDLE|malloc_trim|fallocate|sendfile|posix_fadvise|pipe2"
    r"|accept4|close_range|gettid|getrandom|\bsyscall\("
)
WITH_FALLBACK = {
    "native/dispatch.cpp": {
        "asm/hwcap",
        "getauxval(",
        "syscall(",
    },  # for __linux__; every Apple core has the dot product
    "native/packed_matrix.cpp": {"MADV_HUGEPAGE"},  # where the header has it
    "src/foreword/backends/cpu/resident.py": {
        "/proc",
        "MADV_DONTNEED",
        "malloc_trim",
    },  # nothing is given back
    "src/foreword/backends/cuda/compiling.py": {"sched_getaffinity"},  # CUDA is on Linux alone
    "src/foreword/bench/learning/processes.py": {"/proc"},
    "src/foreword/bench/peers.py": {"/proc"},
    "src/foreword/bench/server_overhead.py": {"/proc"},
    "src/foreword/cli/bench/common.py": {"/proc"},
    "src/foreword/cluster/pools/fleet.py": {"/proc"},
    "src/foreword/cluster/pools/tied.py": {"prctl("},
    "src/foreword/kernels/native.py": {"sched_getaffinity"},
    "src/foreword/learn/trainer.py": {"/proc"},  # other processes may be ended first
    "src/foreword/learn/training.py": {"/dev/shm"},  # the directory of temporary files
    "src/foreword/models/formats/gguf/file.py": {"MADV_DONTNEED"},  # where the module has it
    "src/foreword/server/router/app.py": {"TCP_KEEPIDLE"},
    "src/foreword/structured/compiled.py": {"malloc_trim"},  # None where the C library has none
    "src/foreword/structured/trial_process.py": {"/proc"},  # the limit of memory is left out
}


def test_what_only_linux_has_is_used_where_there_is_a_fallback():
    files = [*ROOT.glob("src/foreword/**/*.py"), *ROOT.glob("native/**/*.cpp"), *ROOT.glob("native/**/*.h")]
    found = {str(path.relative_to(ROOT)): set(LINUX_ONLY.findall(path.read_text("utf-8"))) for path in files}
    assert {path: names for path, names in found.items() if names} == WITH_FALLBACK


def test_keep_alive_has_another_name(monkeypatch):
    monkeypatch.delattr(socket, "TCP_KEEPIDLE")
    monkeypatch.setattr(socket, "TCP_KEEPALIVE", 16, raising=False)
    assert (socket.IPPROTO_TCP, 16, 10) in app.keep_alive_options()


def test_a_member_ends_after_its_parent(monkeypatch):
    parents, sent = [7, 7, 1], []
    monkeypatch.setattr(os, "getppid", lambda: parents.pop(0))
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    waits: list[float] = []
    tied.end_after(7, waits.append)
    assert waits == [tied.POLL_SECONDS] * 2
    assert sent == [(os.getpid(), signal.SIGTERM)]


def test_a_member_starts_without_prctl(monkeypatch):
    started = []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(sys, "argv", ["tied", str(os.getppid()), "doctor"])
    monkeypatch.setattr(tied.ctypes, "CDLL", None)
    monkeypatch.setattr(runpy, "run_module", lambda *given, **more: started.append(sys.argv[:]))
    tied.main()
    assert started == [["foreword", "doctor"]]


def without_proc(monkeypatch):
    """Path as on a system without /proc."""

    def absent(what):
        def call(self, *given, **more):
            if str(self).startswith("/proc"):
                raise FileNotFoundError(str(self))
            return what(self, *given, **more)

        return call

    monkeypatch.setattr(Path, "read_bytes", absent(Path.read_bytes))
    monkeypatch.setattr(Path, "read_text", absent(Path.read_text))
    monkeypatch.setattr(Path, "is_dir", lambda self: not str(self).startswith("/proc"))


@pytest.mark.parametrize(
    ("printed", "is_up"), [("python -m foreword cluster up f.yaml", True), ("vi up", False)]
)
def test_a_running_cluster_is_found_by_ps(monkeypatch, printed, is_up):
    without_proc(monkeypatch)

    def ps(command, **settings):
        assert command == ["ps", "-p", "12", "-o", "args="]
        return fleet.subprocess.CompletedProcess(command, 0, f"{printed}\n".encode())

    monkeypatch.setattr(fleet.subprocess, "run", ps)
    assert fleet._is_up(12) is is_up


def test_peak_memory_comes_from_getrusage(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert peers.peak_resident_bytes() == pytest.approx(
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, rel=0.5
    )


def test_a_benchmark_that_needs_proc_says_so(monkeypatch):
    without_proc(monkeypatch)
    with pytest.raises(ForewordError, match="on Linux"):
        server_overhead.ServedModel("http://127.0.0.1:1", 1).cpu_seconds()


def test_a_processor_without_a_name_is_left_out(monkeypatch):
    without_proc(monkeypatch)
    assert f"{os.cpu_count()} cores, " in common.provenance()["machine"]


def test_cores_are_counted_without_an_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert native._usable_cores() == 5


def test_no_memory_is_given_back_where_the_calls_are_missing(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(resident.ctypes, "CDLL", None)
    resident.release_unused()


SMAPS = """\
7f00-7f10 r-xp 00000000 08:01 5 /usr/lib/libtorch_cpu.so
Anonymous:             0 kB
Swap:                  0 kB
7f10-7f20 r--p 00010000 08:01 5 /usr/lib/libtorch_cpu.so
Anonymous:             8 kB
Swap:                  0 kB
7f20-7f30 r--p 00020000 08:01 5 /usr/lib/libtorch_cpu.so
Anonymous:             0 kB
Swap:                  8 kB
7f30-7f40 rw-p 00030000 08:01 5 /usr/lib/libtorch_cpu.so
Anonymous:             0 kB
Swap:                  0 kB
7f40-7f50 r-xp 00000000 08:01 6 /usr/lib/libc.so
Anonymous:             0 kB
Swap:                  0 kB
"""


def test_pages_that_differ_from_their_file_are_kept_in_memory_or_swapped_out():
    assert resident.file_mappings(SMAPS) == ((0x7F00, 0x7F10),)
