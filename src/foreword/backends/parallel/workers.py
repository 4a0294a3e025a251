"""Driver side of the worker processes: starts them, sends orders, detects when one is gone, and ends them."""

import itertools
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch

from foreword.backends.parallel.exchange import RankExchange, join_group
from foreword.backends.parallel.messages import JoinRanks, Order, RankReply, SentOrder
from foreword.errors import EngineStopped, RequestError

T = TypeVar("T")

_END_SECONDS = 5.0
"""Seconds to wait for a worker to end by itself before it is killed."""

_NOTICE_SECONDS = 0.5
"""Seconds to wait for a process to end after its connection has ended."""

_Process = subprocess.Popen[bytes]

_WORKER = "foreword.backends.parallel.worker"


class RankFault(RuntimeError):  # noqa: N818 - reads as what happened
    """Another rank failed to execute an order. All ranks are still in step and can continue."""


@dataclass
class _Liveness:
    """Whether orders can be sent to the ranks, and the listeners that are notified when they no longer can."""

    lost: str = ""  # why the ranks are lost; empty: they are not
    closing: bool = False  # whether the driver has ended the ranks
    listeners: list[Callable[[str], None]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def report_loss(self, reason: str) -> None:
        with self.lock:
            if self.lost or self.closing:
                return
            self.lost = reason
        for callback in list(self.listeners):
            callback(reason)


class Workers:
    """All ranks but the first, which is this process."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Start `size - 1` processes. The ranks share this machine's cores, or have one GPU each."""
        _check_devices(size, device)
        self.size = size
        self._device = device
        self._liveness = _Liveness()
        self._lock = threading.RLock()  # one order and its replies at a time
        self._numbers = itertools.count(1)
        self._released: deque[int] = deque()
        self._folder = tempfile.TemporaryDirectory(prefix="foreword-ranks-")
        self._connections: list[Connection] = []
        self._processes: list[_Process] = []
        for _ in range(1, size):
            self._start_worker()
        self._threads = torch.get_num_threads()
        self._end = weakref.finalize(
            self, _end_all, self._liveness, self._processes, self._connections, self._folder, self._threads
        )
        try:
            self.exchange = self._join_group()
        except BaseException:
            self.close()
            raise

    def _start_worker(self) -> None:
        driver_end, worker_end = Pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", _WORKER, str(worker_end.fileno())],
            pass_fds=[worker_end.fileno()],
            stdin=subprocess.PIPE,  # the worker ends when it closes
            stdout=subprocess.DEVNULL,
        )
        worker_end.close()
        self._connections.append(driver_end)
        self._processes.append(process)
        arguments = (self._liveness, process, self._processes, self._device.type)
        threading.Thread(target=_watch, args=arguments, name="foreword-rank", daemon=True).start()

    def _join_group(self) -> RankExchange:
        threads = max(1, self._threads // self.size)
        rendezvous = str(Path(self._folder.name) / "rendezvous")
        self._replies(0)
        orders = [
            JoinRanks(rank, self.size, _device_of(self._device, rank), threads, rendezvous)
            for rank in range(1, self.size)
        ]
        if self._device.type == "cpu":
            torch.set_num_threads(threads)
        first = torch.device(_device_of(self._device, 0))
        return self.run(orders, lambda: join_group(first, 0, self.size, rendezvous))

    @property
    def device(self) -> torch.device:
        return torch.device(_device_of(self._device, 0))

    def new_number(self) -> int:
        return next(self._numbers)

    def forget(self, number: int) -> None:
        """Release the decoder or store of this number on all ranks, with the next order. Safe in a finalizer."""
        self._released.append(number)

    def when_lost(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the reason, in any thread, when a rank is lost; immediately if one already is."""
        self._liveness.listeners.append(callback)
        if self._liveness.lost:
            callback(self._liveness.lost)

    def run(
        self,
        orders: Order | Sequence[Order],
        run_here: Callable[[], T],
        payloads: bytes | Sequence[bytes] = b"",
    ) -> T:
        """Run an order on all other ranks, and `run_here` on this one; return its result if all succeed.

        If an order fails on some rank but all ranks are in step, raise that failure (`RankFault` if it is another
        rank's). Otherwise the ranks are lost: raise `EngineStopped`.
        """
        orders_by_rank = [orders] * len(self._connections) if isinstance(orders, Order) else orders
        payloads_by_rank = [payloads] * len(self._connections) if isinstance(payloads, bytes) else payloads
        with self._lock:
            self._require_alive()
            number = next(self._numbers)
            self._send(number, orders_by_rank, payloads_by_rank)
            try:
                result = run_here()
            except EngineStopped as error:
                raise self._end_after_loss(str(error)) from error
            except BaseException:
                self._replies(number)
                raise
            if errors := self._replies(number):
                raise RankFault(errors[0])
            return result

    def _send(self, number: int, orders: Sequence[Order], payloads: Sequence[bytes]) -> None:
        released = [self._released.popleft() for _ in range(len(self._released))]
        try:
            for connection, order, payload in zip(self._connections, orders, payloads, strict=True):
                SentOrder(number, order, released, payload).send(connection)
        except BaseException as error:  # some ranks may have received it
            raise self._end_after_loss(f"an order could not be sent: {error}") from error

    def _replies(self, number: int) -> list[str]:
        """Wait for all replies to an order; return the ranks' errors. Replies to interrupted orders are skipped."""
        errors = []
        for rank, connection in enumerate(self._connections, start=1):
            try:
                while (reply := RankReply.receive(connection)).number != number:
                    pass
            except (EOFError, OSError, ValueError) as error:
                raise self._end_after_loss(f"rank {rank} does not answer") from error
            if reply.error:
                errors.append(f"rank {rank} of {self.size}: {reply.error}")
        return errors

    def _require_alive(self) -> None:
        if self._liveness.lost or self._liveness.closing:
            raise EngineStopped(self._liveness.lost or "the ranks of this model were ended")

    def _end_after_loss(self, default_reason: str) -> EngineStopped:
        """Kill all ranks, because some are out of step or gone; return the error to raise."""
        self._liveness.report_loss(self._liveness.lost or _ended_rank(self._processes) or default_reason)
        for process in self._processes:
            process.kill()
        return EngineStopped(self._liveness.lost or default_reason)

    def close(self) -> None:
        self._end()


def _check_devices(size: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    available = torch.cuda.device_count()
    if (device.index or 0) + size > available:
        raise RequestError(
            f"tensor_parallel_size {size} needs as many GPUs from {device} on, and there are {available}; use fewer"
        )


def _device_of(first: torch.device, rank: int) -> str:
    return "cpu" if first.type == "cpu" else f"cuda:{(first.index or 0) + rank}"


def _watch(liveness: _Liveness, process: _Process, processes: Sequence[_Process], device: str) -> None:
    """Wait until a rank's process ends, and report the loss; with GPUs, end this process."""
    process.wait()
    if liveness.closing or liveness.lost:
        return
    reason = _ended_rank(processes)
    if device == "cuda":
        # A GPU collective would wait forever, and its result must not be read as logits.
        logging.getLogger("foreword").critical("%s", reason)
        os._exit(1)
    liveness.report_loss(reason)


def _ended_rank(processes: Sequence[_Process]) -> str:
    """Return which rank has ended first, and how; empty: none has ended.

    Wait briefly, because a connection ends before its process. Exit codes other than 0 come first: a rank that loses
    the others exits with code 0.
    """
    ended: dict[int, _Process] = {}
    for rank, process in enumerate(processes, start=1):
        with suppress(subprocess.TimeoutExpired):
            process.wait(_NOTICE_SECONDS)
            ended[rank] = process
    first = min(ended, key=lambda rank: (ended[rank].returncode == 0, rank), default=None)
    return "" if first is None else _describe_exit(ended[first], first)


def _describe_exit(process: _Process, rank: int) -> str:
    code = process.returncode
    end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"
    return (
        f"rank {rank} (process {process.pid}) {end}: the model cannot run without it; start the engine again"
    )


def _end_all(
    liveness: _Liveness,
    processes: Sequence[_Process],
    connections: Sequence[Connection],
    folder: "tempfile.TemporaryDirectory[str]",
    threads: int,
) -> None:
    liveness.closing = True
    for process, connection in zip(processes, connections, strict=True):
        if process.stdin is not None:
            process.stdin.close()
        connection.close()
    for process in processes:
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    torch.set_num_threads(threads)
    folder.cleanup()
