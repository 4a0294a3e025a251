"""A process that has imported everything and forks for every command: torch takes seconds to import.

The command has a process, standard streams and an exit code of its own, as one that was started by itself.
"""

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

_IGNORED = "PYTEST_CURRENT_TEST"  # changes with every test and says nothing to the command


class WarmProcess:
    """Starts when it is first asked; belongs to one process of the tests."""

    def __init__(self) -> None:
        self._owner = 0  # the process that started it
        self._environment: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def fits(self) -> bool:
        """Whether the environment is the one that it was started with: modules may have read it."""
        return self._owner != os.getpid() or _environment() == self._environment

    def run(
        self, arguments: tuple[str, ...], stdin: str | None, seconds: float
    ) -> subprocess.CompletedProcess[str]:
        with _given(stdin) as text, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            code = self._fork(arguments, [text.fileno(), out.fileno(), err.fileno()], seconds)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        return subprocess.CompletedProcess(["foreword", *arguments], code, *texts)

    def _fork(self, arguments: tuple[str, ...], files: list[int], seconds: float) -> int:
        connection = self._connection()
        connection.settimeout(seconds)
        message = json.dumps([str(Path.cwd()), *arguments]).encode()
        socket.send_fds(connection, [len(message).to_bytes(4, "big")], files)
        connection.sendall(message)
        pid = _number(connection)
        try:
            return _number(connection)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(["foreword", *arguments], seconds) from None

    def _connection(self) -> socket.socket:
        if self._socket is None or self._owner != os.getpid():
            self._socket, theirs = socket.socketpair()
            self._owner, self._environment = os.getpid(), _environment()
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            theirs.close()
            atexit.register(self._socket.close)
        return self._socket


def _given(stdin: str | None) -> IO[bytes]:
    if stdin is None:
        return Path(os.devnull).open("rb")
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by whoever asked
    file.write(stdin.encode())
    file.seek(0)
    return file


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != _IGNORED}


def _number(connection: socket.socket) -> int:
    data = connection.recv(4, socket.MSG_WAITALL)
    if len(data) < 4:
        raise EOFError("the other side is gone")
    return int.from_bytes(data, "big", signed=True)


def _serve(connection: socket.socket) -> list[str]:
    """Fork for every command that comes; returns in the new process, with its streams in place."""
    while True:
        try:
            header, files, _, _ = socket.recv_fds(connection, 4, 3)
        except ConnectionError:
            sys.exit()
        if len(header) < 4:
            sys.exit()
        message = connection.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL)
        folder, *arguments = json.loads(message)
        pid = os.fork()
        if pid == 0:
            connection.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            os.chdir(folder)
            return arguments
        for file in files:
            os.close(file)
        connection.sendall(pid.to_bytes(4, "big", signed=True))
        _, status = os.waitpid(pid, 0)
        connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))


if __name__ == "__main__":
    import foreword.bench.drafters.measure
    import foreword.engine.engine
    import foreword.server.app
    import foreword.train.loop.run  # noqa: F401 - so that no command has to
    from foreword.cli.main import main

    gc.freeze()  # what is there is not looked at again when a command ends
    sys.argv[1:] = _serve(socket.socket(fileno=int(sys.argv[1])))
    sys.argv[0] = "foreword"
    main()
