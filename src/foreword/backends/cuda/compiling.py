"""Compiles kernels in other processes during steps, and loads them between steps."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from functools import cache
from queue import Empty, SimpleQueue
from time import perf_counter

import torch

from foreword.backends.cuda.graphs import PASSES
from foreword.backends.cuda.kernels.rows import take_rows
from foreword.kernels.launching import NotCompiledError
from foreword.kernels.recording import Variant, is_recording, recording

_log = logging.getLogger(__name__)

SPARE_CORES = 2
"""Cores that the compiler leaves to the engine."""


class CompileProcess:
    """The process of `compile_server`. It starts with the first variant, if not before."""

    def __init__(self, arch: int) -> None:
        self._arch = arch
        self._process: subprocess.Popen[bytes] | None = None
        self._sent: list[Variant] = []
        self._done: SimpleQueue[tuple[Variant | None, str]] = SimpleQueue()

    def start(self) -> None:
        """Start the process if it does not run yet. It takes a few seconds until it compiles."""
        if self._process is not None:
            return
        workers = max(1, len(os.sched_getaffinity(0)) - SPARE_CORES)
        module = ("-W", "ignore", "-m", "foreword.backends.cuda.compile_server")
        self._process = subprocess.Popen(
            [sys.executable, *module, str(self._arch), str(workers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        threading.Thread(target=self._read, args=(self._process,), name="compiled", daemon=True).start()

    def compile(self, variant: Variant) -> None:
        """Send a variant to the process, which is started if needed; `done` later returns the variant."""
        self.start()
        assert self._process is not None and self._process.stdin is not None
        self._sent.append(variant)
        try:
            self._process.stdin.write(json.dumps(variant).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            self._done.put((None, str(error)))

    def done(self, timeout: float) -> tuple[Variant | None, str] | None:
        """Return a finished variant and its error (empty: none), waiting for up to `timeout` seconds.

        (None, error): the process has ended. None: no variant has finished.
        """
        try:
            return self._done.get(timeout=timeout) if timeout > 0 else self._done.get_nowait()
        except Empty:
            return None

    def _read(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            number, error = json.loads(line)
            self._done.put((self._sent[number], error))
        self._done.put((None, f"the compile process ended with exit code {process.wait()}"))


class Kernels:
    """State of the kernels of one GPU: which are loaded, and which are being compiled."""

    def __init__(
        self,
        compiler: CompileProcess,
        clock: Callable[[], float] = perf_counter,
        device: torch.device | None = None,
    ) -> None:
        self._compiler, self._clock, self._device = compiler, clock, device
        self.passes = PASSES  # of all CUDA graphs of the process, for the engine's statistics
        # Whether heads wait for their kernels instead of drafting nothing until then; set by benchmarks
        self.are_awaited = False
        self._lock = threading.RLock()  # engines in several threads may share a GPU
        self._loaded: set[Variant] = set()
        self._pending: dict[Variant, None] = {}  # being compiled
        self._compiled: list[Variant] = []  # compiled, not loaded yet
        self._compiled_at_launch: set[Variant] = set()  # not compiled early, because the process failed

    @property
    def loaded(self) -> int:
        return len(self._loaded)

    @property
    def pending(self) -> int:
        """Return the number of requested variants that are not loaded yet."""
        return len(self._pending) + len(self._compiled)

    @property
    def none_at_launch(self) -> bool:
        """Return whether no requested kernel has failed to compile or load in advance.

        Such a kernel is compiled at its launch.
        """
        return not self._compiled_at_launch

    def start_early(self, dtype: torch.dtype) -> None:
        """Start the process before the model is loaded, unless Triton's cache probably has its kernels.

        The test is `take_rows` for this `dtype`, which every model uses: it is loaded if it is in the cache.
        """
        numbers = torch.empty((1, 16), dtype=dtype, device=self._device)
        with recording() as missing:
            take_rows(numbers, numbers.new_empty(1, dtype=torch.int32))
        if not all(map(self._load, missing)):
            self._compiler.start()

    def request(self, variants: Iterable[Variant]) -> None:
        """Load variants that are in Triton's cache; start compiling the others."""
        with self._lock:
            for variant in variants:
                if self.is_ready(variant) or variant in self._pending or variant in self._compiled:
                    continue
                if not self._load(variant):
                    self._pending[variant] = None
                    self._compiler.compile(variant)

    def is_ready(self, variant: Variant) -> bool:
        """Return whether there is nothing to wait for: the variant is loaded, or is compiled at its launch."""
        return variant in self._loaded or variant in self._compiled_at_launch

    def are_ready(self, variants: Iterable[Variant]) -> bool:
        """Return whether all variants are ready; with `are_awaited`, wait for them first."""
        requested = list(variants)
        return all(map(self.is_ready, requested)) or (self.are_awaited and self.wait(requested))

    def advance(self, seconds: float) -> None:
        """Load kernels that have been compiled, one after the other, for about `seconds` at most."""
        end = self._clock() + seconds
        with self._lock:
            while (done := self._compiler.done(0.0)) is not None:
                self._record_done(*done)
            while self._compiled and self._clock() < end:
                variant = self._compiled.pop(0)
                if not self._load(variant):
                    self._compiled_at_launch.add(variant)

    def compile(self, body: Callable[[], object]) -> None:
        """Compile all kernels that `body` would launch, concurrently, and wait; launch nothing."""
        if is_recording():  # a caller is already recording, and will wait for these kernels, too
            return
        with recording() as missing:
            body()
        self.request(missing)
        self.wait(missing)

    def wait(self, variants: Iterable[Variant], until: float | None = None) -> bool:
        """Wait for variants, at most until the clock shows `until`; return whether they are ready."""
        requested = list(variants)
        while not all(map(self.is_ready, requested)):
            seconds_left = 1.0 if until is None else until - self._clock()
            if seconds_left <= 0:
                return False
            with self._lock:
                if not self._compiled and (done := self._compiler.done(min(seconds_left, 1.0))) is not None:
                    self._record_done(*done)
                self.advance(seconds_left)
        return True

    def _record_done(self, variant: Variant | None, error: str) -> None:
        if variant is not None and not error:
            del self._pending[variant]
            self._compiled.append(variant)
            return
        failed = list(self._pending) if variant is None else [variant]
        if failed:
            _log.warning(
                "%d kernels could not be compiled in advance, so each is compiled at its first use: %s",
                len(failed),
                error,
            )
        for failed_variant in failed:
            del self._pending[failed_variant]
            self._compiled_at_launch.add(failed_variant)

    def _load(self, variant: Variant) -> bool:
        try:
            variant.function.load(variant.data)
        except NotCompiledError:
            return False
        self._loaded.add(variant)
        return True


def kernels_of(device: torch.device) -> Kernels:
    """Return the kernels of a GPU, which all models on it share."""
    return _kernels(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _kernels(index: int) -> Kernels:
    major, minor = torch.cuda.get_device_capability(index)
    return Kernels(CompileProcess(10 * major + minor), device=torch.device("cuda", index))
