"""Compiles grammars in another process on trial, to refuse those that cost too much."""

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from threading import Lock, Thread
from typing import IO, Any

from foreword.errors import RequestError
from foreword.structured.compiled import GrammarTokens
from foreword.structured.limits import CompileLimits
from foreword.structured.params import StructuredOutputs, refusal
from foreword.structured.trial_process import LENGTH, Trial, vocabulary_as_json

START_SECONDS = 60.0  # seconds that the process may take to start
END_SECONDS = 5.0  # seconds that the process may take to end
_TIME_SIGNALS = (signal.SIGPROF, signal.SIGALRM)  # end a trial at its time limits


class CompileTrials:
    """Owns the trial process, which is started on demand and again after it ended."""

    def __init__(self, tokens: GrammarTokens, limits: CompileLimits) -> None:
        self._tokens = tokens
        self._limits = limits
        self._numbers = count()
        self._lock = Lock()
        self._is_closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: dict[int, Future[dict[str, Any]]] = {}  # answers to come, by number of the trial

    def run(self, wanted: StructuredOutputs) -> int:
        """Return the bytes that compiling a grammar takes; raise `RequestError` if it is invalid or too expensive."""
        # Retry once if the process ended meanwhile.
        return self._result(self._answer(wanted) or self._answer(wanted), wanted)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._stop()

    @property
    def pid(self) -> int | None:
        """Id of the trial process; None if there is none."""
        return None if self._process is None else self._process.pid

    def _answer(self, wanted: StructuredOutputs) -> dict[str, Any]:
        """Return the process's answer; empty if it ended without one."""
        limits, answered = self._limits, Future[dict[str, Any]]()
        with self._lock:
            if self._is_closed:
                return {}
            if self._process is not None and self._process.poll() is not None:
                self._stop()
            number, waiting = next(self._numbers), self._waiting
            waiting[number] = answered
            try:
                self._send(asdict(Trial(number, wanted, limits)))
            except OSError:  # the process has ended, or could not be started
                self._stop()
        try:
            return answered.result(START_SECONDS + limits.patience * limits.cpu_seconds)
        except FutureTimeoutError:
            with self._lock:
                self._stop()
            raise refusal("the process that compiles grammars does not answer; try again") from None
        finally:
            del waiting[number]

    def _result(self, answer: dict[str, Any], wanted: StructuredOutputs) -> int:
        """Return the bytes that an answer reports; raise `RequestError` for any other answer."""
        seconds, mebibytes = self._limits.cpu_seconds, self._limits.memory_bytes >> 20
        if "refusal" in answer:
            raise RequestError(answer["refusal"])
        if "bytes" in answer:
            return int(answer["bytes"])
        if answer.get("signal") in _TIME_SIGNALS:
            raise refusal(f"{wanted.form} takes longer than {seconds:g} s to compile; make it smaller")
        if "signal" in answer:
            raise refusal(f"{wanted.form} takes more than {mebibytes} MiB to compile; make it smaller")
        raise refusal("the process that compiles grammars has ended; try again")

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._process is None:
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None
        _write(process.stdin.fileno(), message)

    def _start(self) -> None:
        # A fork of a process with several threads could hang. -P: import nothing from the working directory.
        one_thread = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "foreword.structured.trial_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **one_thread},
        )
        self._process = process
        weakref.finalize(self, _end, process)
        arguments = process.stdout, self._waiting
        Thread(target=_listen, args=arguments, name="foreword-grammar-trials", daemon=True).start()
        assert process.stdin is not None
        _write(process.stdin.fileno(), vocabulary_as_json(self._tokens))

    def _stop(self) -> None:
        """End the process, and settle all waiting trials with an empty answer."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)
        for answered in list(self._waiting.values()):
            _settle(answered, {})
        self._waiting = {}


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Close the input of the process, which ends it; kill it if it does not end."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _listen(answers: IO[bytes], waiting: "dict[int, Future[dict[str, Any]]]") -> None:
    """Deliver the answers of one process until it ends."""
    with answers:
        while len(header := answers.read(LENGTH.size)) == LENGTH.size:
            answer = json.loads(answers.read(LENGTH.unpack(header)[0]))
            if (answered := waiting.get(answer["number"])) is not None:
                _settle(answered, answer)
    for answered in list(waiting.values()):
        _settle(answered, {})


def _settle(answered: "Future[dict[str, Any]]", answer: dict[str, Any]) -> None:
    """Set the result, unless there is one."""
    with suppress(Exception):  # already settled
        answered.set_result(answer)


def _write(descriptor: int, message: Mapping[str, Any]) -> None:
    """Write a message to a pipe, which may take several writes."""
    body = json.dumps(message).encode()
    unwritten = memoryview(LENGTH.pack(len(body)) + body)
    while unwritten:
        unwritten = unwritten[os.write(descriptor, unwritten) :]
