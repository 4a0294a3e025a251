"""Runs the process for trial compilations: `python -m foreword.structured.trial_process`.

The process holds the vocabulary and forks for every grammar. The operating system ends the fork when it exceeds its
memory or CPU limit, also inside native code. Nothing is compiled in the parent process, so that it stays small. It ends
when its standard input is closed, so it does not outlive the process that started it.
"""

import json
import os
import resource
import select
import signal
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from foreword.errors import RequestError
from foreword.structured.compiled import GrammarTokens
from foreword.structured.compiling import compiled, try_first_tokens
from foreword.structured.limits import CompileLimits
from foreword.structured.params import StructuredOutputs, refusal

if TYPE_CHECKING:
    from llguidance import LLTokenizer

LENGTH = struct.Struct("<I")  # message length in bytes, sent before every message
REQUESTS, ANSWERS = 0, 1  # file descriptors from which trials are read and to which answers are written
_MESSAGE_CHARACTERS = 400  # maximum length of an error, so that an answer fits into one atomic pipe write

_SMALL = StructuredOutputs(regex=".*")
"""A response format that is compiled first, so that one-time allocations are not counted."""

_NICENESS = 5  # niceness of compilation, so that passes have priority


@dataclass(frozen=True)
class Trial:
    """A grammar to compile."""

    number: int  # repeated in the answer
    wanted: StructuredOutputs
    limits: CompileLimits

    @staticmethod
    def from_json(message: Mapping[str, Any]) -> "Trial":
        wanted, limits = StructuredOutputs(**message["wanted"]), CompileLimits(**message["limits"])
        return Trial(message["number"], wanted, limits)


def vocabulary_as_json(tokens: GrammarTokens) -> dict[str, Any]:
    """Return a vocabulary as a message; every byte becomes one character."""
    return {
        "pieces": [piece.decode("latin-1") for piece in tokens.pieces],
        "end_ids": list(tokens.end_ids),
        "control_ids": list(tokens.control_ids),
        "control_names": sorted(tokens.control_names),
    }


def vocabulary_from(message: Mapping[str, Any]) -> GrammarTokens:
    """Return the vocabulary of a message that `vocabulary_as_json` made."""
    return with_longest_pieces(
        [piece.encode("latin-1") for piece in message["pieces"]],
        tuple(message["end_ids"]),
        message["control_ids"],
        frozenset(message["control_names"]),
    )


def serve() -> None:
    """Read the vocabulary, then fork for every trial until the input is closed."""
    os.nice(_NICENESS)
    vocabulary = _message()
    if vocabulary is None:
        return
    tokens = vocabulary_from(vocabulary)
    tokenizer = tokens.for_llguidance()
    # A pipe that the end of a fork (SIGCHLD) makes readable, so that `select` returns.
    wakeup_reader, wakeup_writer = os.pipe()
    os.set_blocking(wakeup_writer, False)
    signal.set_wakeup_fd(wakeup_writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}  # trial number by process id
    while True:
        ready, _, _ = select.select([REQUESTS, wakeup_reader], [], [])
        if wakeup_reader in ready:
            os.read(wakeup_reader, 4096)
            _report_ended(running)
        if REQUESTS in ready:
            message = _message()
            if message is None:
                break
            trial = Trial.from_json(message)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                _run(trial, tokens, tokenizer)
            running[pid] = trial.number
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def with_longest_pieces(
    pieces: list[bytes], end_ids: tuple[int, ...], control_ids: list[int], control_names: frozenset[str]
) -> GrammarTokens:
    """Return a vocabulary whose tokenizer simply takes the longest piece; the cost of a trial is the same."""
    special = {*end_ids, *control_ids}
    ids = {piece: token for token, piece in enumerate(pieces) if piece and token not in special}
    longest = max(map(len, ids), default=1)

    def encode(text: str) -> list[int]:
        encoded, data, position = [], text.encode(), 0
        while position < len(data):
            sizes = range(min(longest, len(data) - position), 0, -1)
            size = next((size for size in sizes if data[position : position + size] in ids), 0)
            if size:
                encoded.append(ids[data[position : position + size]])
            position += max(size, 1)  # skip a byte that no token begins with
        return encoded

    return GrammarTokens(pieces, end_ids, encode, control_ids, control_names)


def _run(trial: Trial, tokens: GrammarTokens, tokenizer: "LLTokenizer") -> NoReturn:
    """Compile a grammar in this forked process, within limits; send the answer and exit."""
    answer: dict[str, Any] = {"number": trial.number}
    try:
        _limit(trial.limits)
        with suppress(RequestError):
            try_first_tokens(compiled(_SMALL, tokens, tokenizer), _SMALL.form)
        initial_bytes = _peak_bytes()
        grammar = compiled(trial.wanted, tokens, tokenizer)
        try_first_tokens(grammar, trial.wanted.form)
        answer["bytes"] = _peak_bytes() - initial_bytes
    except RequestError as error:
        answer["refusal"] = str(error)[:_MESSAGE_CHARACTERS]
    except MemoryError:
        os._exit(1)  # reported by the process that forked this one, as if the system had ended it
    except BaseException as error:
        answer["refusal"] = str(refusal(f"{trial.wanted.form}: {error!r}"))[:_MESSAGE_CHARACTERS]
    _answer(answer)
    os._exit(0)


def _limit(limits: CompileLimits) -> None:
    """Let the operating system end this process at its CPU, wall-clock or memory limit."""
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, limits.patience * limits.cpu_seconds)
    with suppress(OSError, ValueError):  # no such limit, or no /proc: macOS
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = used + limits.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _peak_bytes() -> int:
    """Return the largest memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _report_ended(running: dict[int, int]) -> None:
    """Remove ended forks from `running`; send an answer for each that did not send its own."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        number = running.pop(pid)
        if status != 0:
            _answer({"number": number, "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0})


def _answer(answer: dict[str, Any]) -> None:
    written = json.dumps(answer).encode()
    os.write(ANSWERS, LENGTH.pack(len(written)) + written)


def _message() -> Any:  # noqa: ANN401 - any JSON
    """Return the next message of the process that started this one; None at the end of the input."""
    header = _exactly(LENGTH.size)
    body = header and _exactly(LENGTH.unpack(header)[0])
    return json.loads(body) if body else None


def _exactly(size: int) -> bytes:
    """Read this number of bytes; return b"" if the input ends before that."""
    data = bytearray()
    while len(data) < size:
        chunk = os.read(REQUESTS, size - len(data))
        if not chunk:
            return b""
        data += chunk
    return bytes(data)


if __name__ == "__main__":
    serve()
