"""A process that compiles kernels into Triton's disk cache: it reads variants and forks a process for each.

It runs next to an engine, so that steps never wait for the compiler: the engine loads the compiled kernels. It needs
no GPU. Each line of its input is a variant as JSON; each line of its output has the number of a finished variant, and
its error if any. The process ends with its input.
"""

import json
import os
import select
import sys
from types import SimpleNamespace

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from foreword.kernels.launching import NotCompiledError
from foreword.kernels.recording import Variant

POLL_SECONDS = 0.02
"""Seconds between checks for ended processes while no input arrives."""


class TargetOnly:
    """A Triton driver without a device: it only names the architecture to compile for."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target
        self.utils = SimpleNamespace()

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def compile_one(variant: Variant) -> None:
    """Compile a kernel and its launcher, unless they are in the cache."""
    made = variant.function.compile(variant.data)
    if hasattr(nvidia, "make_launcher"):  # Triton up to 3.6 also compiles a launcher
        nvidia.CudaLauncher(made.src, made.metadata)


class CompileServer:
    """Compiles several variants at a time, each in a process."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._waiting: list[tuple[int, Variant]] = []
        self._running: dict[int, tuple[int, int]] = {}  # by process id: variant number, pipe of its report

    def add(self, number: int, variant: Variant) -> None:
        self._waiting.append((number, variant))

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._running)

    def advance(self) -> None:
        """Report finished variants, and start more."""
        while self._running:
            process, _ = os.waitpid(-1, os.WNOHANG)
            if not process:
                break
            number, report = self._running.pop(process)
            with os.fdopen(report, encoding="utf-8") as lines:
                self._tell(number, lines.read())
        while self._waiting and len(self._running) < self._workers:
            number, variant = self._waiting.pop(0)
            try:  # also hashes Triton's files, once for all processes
                variant.function.find(variant.data)
            except NotCompiledError:
                self._fork(number, variant)
            except Exception as error:
                self._tell(number, repr(error))
            else:
                self._tell(number, "")

    def _fork(self, number: int, variant: Variant) -> None:
        report, said = os.pipe()
        process = os.fork()
        if process:
            os.close(said)
            self._running[process] = number, report
            return
        try:
            compile_one(variant)
        except BaseException as error:
            os.write(said, repr(error)[:1000].encode())
        finally:
            os._exit(0)

    def _tell(self, number: int, error: str) -> None:
        print(json.dumps([number, error]), flush=True)


def main(arch: int, workers: int) -> None:
    """Compile incoming variants for GPUs of this architecture."""
    driver.set_active(TargetOnly(GPUTarget("cuda", arch, 32)))
    os.nice(5)  # the engine has priority
    server, lines, number = CompileServer(workers), b"", 0
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS if server.is_busy else None)
        if ready:
            more = os.read(sys.stdin.fileno(), 1 << 20)
            if not more:
                return
            *whole, lines = (lines + more).split(b"\n")
            for line in whole:
                server.add(number, Variant(*json.loads(line)))
                number += 1
        server.advance()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
