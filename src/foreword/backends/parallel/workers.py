"""Driver side of the worker processes: starts them, sends orders, detects their death, ends them."""

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
"""Seconds for a worker to end by itself."""

_NOTICE_SECONDS = 0.5
"""Seconds between the end of a connection and that of its process."""

_Process = subprocess.Popen[bytes]

_WORKER = "foreword.backends.parallel.worker"


class RankFault(RuntimeError):  # noqa: N818 - reads as what happened
    """Another rank failed to execute an order; all ranks are in step and can continue."""


@dataclass
class _Liveness:
    """Return whether orders can be sent to the ranks."""

    lost: str = ""  # reason, if they cannot
    closing: bool = False
    listeners: list[Callable[[str], None]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def lose(self, reason: str) -> None:
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
        self._life = _Liveness()
        self._lock = threading.RLock()  # one order and its replies at a time
        self._numbers = itertools.count(1)
        self._released: deque[int] = deque()
        self._folder = tempfile.TemporaryDirectory(prefix="foreword-ranks-")
        self._connections: list[Connection] = []
        self._processes: list[_Process] = []
        for _ in range(1, size):
            self._start_one()
        self._threads = torch.get_num_threads()
        self._end = weakref.finalize(
            self, _end_all, self._life, self._processes, self._connections, self._folder, self._threads
        )
        try:
            self.exchange = self._join_group()
        except BaseException:
            self.close()
            raise

    def _start_one(self) -> None:
        ours, theirs = Pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", _WORKER, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,  # the worker ends when it closes
            stdout=subprocess.DEVNULL,
        )
        theirs.close()
        self._connections.append(ours)
        self._processes.append(process)
        arguments = (self._life, process, self._processes, self._device.type)
        threading.Thread(target=_watch, args=arguments, name="foreword-rank", daemon=True).start()

    def _join_group(self) -> RankExchange:
        each = max(1, self._threads // self.size)
        rendezvous = str(Path(self._folder.name) / "rendezvous")
        self._replies(0)
        orders = [
            JoinRanks(rank, self.size, _device_of(self._device, rank), each, rendezvous)
            for rank in range(1, self.size)
        ]
        if self._device.type == "cpu":
            torch.set_num_threads(each)
        first = torch.device(_device_of(self._device, 0))
        return self.run(orders, lambda: join_group(first, 0, self.size, rendezvous))

    @property
    def device(self) -> torch.device:
        return torch.device(_device_of(self._device, 0))

    def new_number(self) -> int:
        return next(self._numbers)

    def forget(self, number: int) -> None:
        """Release what has this number on all ranks, with the next order. Safe in a finalizer."""
        self._released.append(number)

    def when_lost(self, callback: Callable[[str], None]) -> None:
        """Call `callback`, in any thread, when a rank dies; immediately if one has."""
        self._life.listeners.append(callback)
        if self._life.lost:
            callback(self._life.lost)

    def run(
        self, orders: Order | Sequence[Order], own: Callable[[], T], payloads: bytes | Sequence[bytes] = b""
    ) -> T:
        """Run an order on all other ranks and `own` here; all must succeed.

        A failure of one rank is raised here, with all ranks in step; otherwise `EngineStopped`.
        """
        each = [orders] * len(self._connections) if isinstance(orders, Order) else orders
        each_payload = [payloads] * len(self._connections) if isinstance(payloads, bytes) else payloads
        with self._lock:
            self._check()
            number = next(self._numbers)
            self._send(number, each, each_payload)
            try:
                done = own()
            except EngineStopped as error:
                raise self._give_up(str(error)) from error
            except BaseException:
                self._replies(number)
                raise
            if errors := self._replies(number):
                raise RankFault(errors[0])
            return done

    def _send(self, number: int, orders: Sequence[Order], payloads: Sequence[bytes]) -> None:
        released = [self._released.popleft() for _ in range(len(self._released))]
        try:
            for connection, order, payload in zip(self._connections, orders, payloads, strict=True):
                SentOrder(number, order, released, payload).send(connection)
        except BaseException as error:  # some ranks may have received it
            raise self._give_up(f"an order could not be sent: {error}") from error

    def _replies(self, number: int) -> list[str]:
        """Return the errors of the ranks; replies to interrupted orders are skipped."""
        errors = []
        for rank, connection in enumerate(self._connections, start=1):
            try:
                while (answer := RankReply.receive(connection)).number != number:
                    pass
            except (EOFError, OSError, ValueError) as error:
                raise self._give_up(f"rank {rank} does not answer") from error
            if answer.error:
                errors.append(f"rank {rank} of {self.size}: {answer.error}")
        return errors

    def _check(self) -> None:
        if self._life.lost or self._life.closing:
            raise EngineStopped(self._life.lost or "the ranks of this model were ended")

    def _give_up(self, otherwise: str) -> EngineStopped:
        """Give up on the ranks, which are out of step or gone."""
        self._life.lose(self._life.lost or _ended_rank(self._processes) or otherwise)
        for process in self._processes:
            process.kill()
        return EngineStopped(self._life.lost or otherwise)

    def close(self) -> None:
        self._end()


def _check_devices(size: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    there = torch.cuda.device_count()
    if (device.index or 0) + size > there:
        raise RequestError(
            f"tensor_parallel_size {size} needs as many GPUs from {device} on, and there are {there}; use fewer"
        )


def _device_of(first: torch.device, rank: int) -> str:
    return "cpu" if first.type == "cpu" else f"cuda:{(first.index or 0) + rank}"


def _watch(life: _Liveness, process: _Process, all_of_them: Sequence[_Process], device: str) -> None:
    process.wait()
    if life.closing or life.lost:
        return
    reason = _ended_rank(all_of_them)
    if device == "cuda":
        # A GPU collective would wait forever, and its result must not be read as logits.
        logging.getLogger("foreword").critical("%s", reason)
        os._exit(1)
    life.lose(reason)


def _ended_rank(processes: Sequence[_Process]) -> str:
    """Return which rank has ended; empty: none.

    Waits briefly, because a connection ends before its process. A rank that is left alone exits with code 0.
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
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"
    return (
        f"rank {rank} (process {process.pid}) {how}: the model cannot run without it; start the engine again"
    )


def _end_all(
    life: _Liveness,
    processes: Sequence[_Process],
    connections: Sequence[Connection],
    folder: "tempfile.TemporaryDirectory[str]",
    threads: int,
) -> None:
    life.closing = True
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
