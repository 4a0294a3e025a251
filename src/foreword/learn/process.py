"""Starts trainings in processes of their own, which end with the engine's process."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from foreword.learn.pausing import TrainerProcess

StartTrainer = Callable[[Sequence[str], Path, Path, int], TrainerProcess]
"""Starts `foreword` with arguments; further arguments: the head that it writes, its log, its nice value."""


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
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):  # it ends just now
                os.killpg(self._process.pid, number)


def start_trainer(arguments: Sequence[str], head: Path, log: Path, nice: int) -> TrainerProcess:
    """Start a training. Call it in a thread that lives as long as the engine: the process ends with its thread."""
    command = [sys.executable, "-m", "foreword.learn.trainer", str(os.getpid()), str(nice)]
    command += [str(head), *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return _Trainer(process)
