"""Program that compiles kernels into Triton's disk cache: it reads variants and forks a process for each.

It runs beside an engine, which loads the compiled kernels, so that steps never wait for the compiler. It needs no GPU.
Each line of its input is a variant as JSON. Each line of its output is the number of a finished variant, counted from 0
in the order of the input, and the error, which is empty after success. The program ends when its input ends.
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
"""Seconds between checks for ended processes."""


class TargetOnly:
    """A Triton driver without a device, which only names the architecture to compile for."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target
        self.utils = SimpleNamespace()

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def compile_one(variant: Variant) -> None:
    """Compile a kernel and its launcher into the cache."""
    compiled = variant.function.compile(variant.data)
    if hasattr(nvidia, "make_launcher"):  # Triton up to 3.6 also compiles a launcher
        nvidia.CudaLauncher(compiled.src, compiled.metadata)


class CompileServer:
    """Compiles several variants at a time, each in its own process."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._waiting: list[tuple[int, Variant]] = []
        # By process id: number of the variant, pipe that receives its error
        self._running: dict[int, tuple[int, int]] = {}

    def add(self, number: int, variant: Variant) -> None:
        self._waiting.append((number, variant))

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._running)

    def advance(self) -> None:
        """Report finished variants, and start compiling waiting ones."""
        while self._running:
            process, _ = os.waitpid(-1, os.WNOHANG)
            if not process:
                break
            number, reader = self._running.pop(process)
            with os.fdopen(reader, encoding="utf-8") as lines:
                self._report(number, lines.read())
        while self._waiting and len(self._running) < self._workers:
            number, variant = self._waiting.pop(0)
            try:
                # The first call hashes Triton's files, which forked processes then need not do.
                variant.function.find(variant.data)
            except NotCompiledError:
                self._fork(number, variant)
            except Exception as error:
                self._report(number, repr(error))
            else:
                self._report(number, "")

    def _fork(self, number: int, variant: Variant) -> None:
        reader, writer = os.pipe()
        process = os.fork()
        if process:
            os.close(writer)
            self._running[process] = number, reader
            return
        try:
            compile_one(variant)
        except BaseException as error:
            os.write(writer, repr(error)[:1000].encode())
        finally:
            os._exit(0)

    def _report(self, number: int, error: str) -> None:
        print(json.dumps([number, error]), flush=True)


def main(arch: int, workers: int) -> None:
    """Compile incoming variants for GPUs of this architecture."""
    driver.set_active(TargetOnly(GPUTarget("cuda", arch, 32)))
    os.nice(5)  # the engine has priority
    server = CompileServer(workers)
    unfinished_line, number = b"", 0  # input after the last newline; number of the next variant
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS if server.is_busy else None)
        if ready:
            more = os.read(sys.stdin.fileno(), 1 << 20)
            if not more:
                return
            *lines, unfinished_line = (unfinished_line + more).split(b"\n")
            for line in lines:
                server.add(number, Variant(*json.loads(line)))
                number += 1
        server.advance()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
