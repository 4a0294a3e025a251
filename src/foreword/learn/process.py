"""Starts trainings in processes of their own, which end with the engine's process."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from foreword.learn.pausing import TrainerProcess

StartTrainer = Callable[[Sequence[str], Path, Path, int], TrainerProcess]
"""Starts `foreword` with arguments; further arguments: the head that it writes, its log, its nice value."""


TIE_SECONDS = 60.0  # maximum seconds until a started process is tied to this one: Python must have started


class _Trainer:
    """A training in a process of its own, with a process group of its own."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.poll()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def wait(self) -> None:
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):  # it ends just now
                os.killpg(self._process.pid, number)


def start_trainer(arguments: Sequence[str], head: Path, log: Path, nice: int) -> TrainerProcess:
    """Start a training. Call it in a thread that lives as long as the engine: the process ends with its thread."""
    command = [sys.executable, "-m", "foreword.learn.trainer", str(os.getpid()), str(nice)]
    with log.open("wb") as output, _awaited_end() as end:
        process = subprocess.Popen(
            [*command, str(end), str(head), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(end,),
        )
    return _Trainer(process)


@contextmanager
def _awaited_end() -> Iterator[int]:
    """Yield an open file for a new process; at the end, wait until it has closed the file or ended.

    A process that is paused before it is tied to this one would outlive it, paused for ever.
    """
    read_end, write_end = os.pipe()
    try:
        try:
            yield write_end
        finally:
            os.close(write_end)
        select.select([read_end], [], [], TIE_SECONDS)
    finally:
        os.close(read_end)
