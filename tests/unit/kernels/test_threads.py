"""Threads of the CPU kernels: how many there may be, and what happens where they cannot run."""

import os
from pathlib import Path

import pytest

from foreword.errors import RequestError
from foreword.kernels.native import choose_threads
from helpers.cpu import needs_cpu_kernels
from helpers.warm_process import warm

IMPORTS = "import os, resource, signal, sys, numpy as np; from foreword.kernels import _native\n"

WITHOUT_ROOM_FOR_STACKS = """
mapped = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (mapped + (256 << 20), resource.RLIM_INFINITY))
"""


def run_script(script: str) -> str:
    """What the program prints, within a limit: a hang is a failure."""
    end = "sys.stdout.flush(); os._exit(0)"  # taking all modules apart takes longer than the script
    done = warm.run([], None, 60, {"FOREWORD_THREADS": "3"}, f"{IMPORTS}{script}\n{end}\n")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_more_threads_than_a_machine_can_use_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert choose_threads(32) == 32
    for count in ("33", "2000", "100000", "9" * 30):
        monkeypatch.setenv("FOREWORD_THREADS", count)
        with pytest.raises(RequestError, match=rf"at most 32 on this machine, not {count}$"):
            choose_threads()


@needs_cpu_kernels
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


FORKED = """
child = os.fork()
if child == 0:
    signal.alarm(30)  # ends a child that hangs
    {in_child}
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@needs_cpu_kernels
@pytest.mark.parametrize("threads", [1, 3])
def test_a_decoder_in_a_forked_child_raises_and_can_be_dropped(threads: int):
    build = f"""
from dataclasses import replace
from foreword.backends.cpu.decoder import load_cpu_decoder
from foreword.backends.cpu.packing import FORMATS
from helpers.passes import all_logits
from helpers.random_checkpoint import SMOLLM2_SHAPE, RandomCheckpoint

shape = replace(SMOLLM2_SHAPE, layers=SMOLLM2_SHAPE.layers[:1], vocab_size=64)
decoder = load_cpu_decoder(RandomCheckpoint(shape), FORMATS["int8"], threads={threads})
all_logits(decoder, [1, 2, 3])
"""
    in_child = """
    try:
        all_logits(decoder, [1, 2, 3])
    except RuntimeError as error:
        print(error, flush=True)
    del decoder
"""
    message, status = run_script(build + FORKED.format(in_child=in_child)).splitlines()
    assert "forked" in message
    assert status == "0"


@needs_cpu_kernels
def test_a_forked_child_draws_with_a_sampler_of_its_own():
    build = """
import torch
from foreword.kernels.sampler import draw, native_sampler

rows = torch.zeros(3), torch.zeros(3), torch.ones(3, dtype=torch.float64), torch.full((3,), -1)
arguments = torch.zeros(3, 100), *rows, torch.arange(3)
before = draw(native_sampler(), *arguments).tolist()
print(before, flush=True)
"""
    in_child = "print(draw(native_sampler(), *arguments).tolist(), flush=True)"
    parent, child, status = run_script(build + FORKED.format(in_child=in_child)).splitlines()
    assert child == parent
    assert status == "0"
