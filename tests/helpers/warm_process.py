"""A process that has imported everything and forks for every command: torch takes seconds to import.

The command has a process, standard streams, an environment and an exit code of its own, as one that was started by
itself. What it starts of this package is forked too, from itself.
"""

import atexit
import gc
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

_OURS_ALONE = {
    "PYTEST_CURRENT_TEST",  # changes with every test
    # Set where torch._dynamo or ray is imported or used.
    *("TORCHINDUCTOR_CACHE_DIR", "RAY_CLIENT_MODE", "RAY_USAGE_STATS_ENABLED", "RAY_AUTH_MODE"),
    "PYTHONBREAKPOINT",
}
"""Variables that no caller has set, and that say nothing to a command: it does not get them."""

_OF_THE_TERMINAL = {"COLUMNS", "NO_COLOR", "FORCE_COLOR", "TERM"}
READ_LATE = _OF_THE_TERMINAL | {
    *("FOREWORD_CACHE", "FOREWORD_API_KEY", "FOREWORD_THREADS", "FOREWORD_ISA"),
    *("RAY_AUTH_TOKEN_PATH", "XDG_STATE_HOME"),
}
"""Variables that are read when a command runs; of others, modules may have seen the value before the fork."""


class Forked:
    """A command that runs; as much of `subprocess.Popen` as the tests use."""

    def __init__(self, status: socket.socket, arguments: Sequence[str]) -> None:
        self._status = status
        self._arguments = arguments
        self.pid = _number(status)
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = _number(self._status)
            except TimeoutError:
                raise subprocess.TimeoutExpired(self._arguments, timeout or 0) from None
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(1e-6)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmProcess:
    """Starts when it is first asked; belongs to one process of the tests."""

    def __init__(self) -> None:
        self._owner = 0  # the process that started it
        self._environment: dict[str, str] = {}
        self._socket: socket.socket | None = None

    def fits(self, env: Mapping[str, str] | None = None) -> bool:
        """Whether a command with these variables besides ours can be forked."""
        if self._owner != os.getpid():
            return not env or env.keys() <= READ_LATE
        wanted = own_environment() | dict(env or {})
        names = (self._environment.keys() | wanted.keys()) - READ_LATE
        changed = {name for name in names if self._environment.get(name) != wanted.get(name)}
        if unforeseen := sorted(changed - (env or {}).keys()):
            warnings.warn(f"all commands start afresh, since a library set {unforeseen}", stacklevel=2)
        return not changed

    def run(
        self,
        arguments: Sequence[str],
        stdin: str | None,
        seconds: float,
        env: Mapping[str, str] | None = None,
        program: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        with _given(stdin) as text, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            files = [text.fileno(), out.fileno(), err.fileno()]
            command = self.start(arguments, files, env, program)
            try:
                code = command.wait(seconds)
            except subprocess.TimeoutExpired:
                command.kill()
                raise
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        return subprocess.CompletedProcess(["foreword", *arguments], code, *texts)

    def start(
        self,
        arguments: Sequence[str],
        files: Sequence[int],
        env: Mapping[str, str] | None = None,
        program: str | None = None,
    ) -> Forked:
        """Run `foreword` or a Python program with these standard streams."""
        connection = self._connection()
        ours, theirs = socket.socketpair()
        environment = own_environment() | dict(env or {})
        message = json.dumps([str(Path.cwd()), environment, program, list(arguments)]).encode()
        with theirs:
            socket.send_fds(connection, [len(message).to_bytes(4, "big")], [*files, theirs.fileno()])
        connection.sendall(message)
        return Forked(ours, arguments)

    def _connection(self) -> socket.socket:
        if self._socket is None or self._owner != os.getpid():
            self._socket, theirs = socket.socketpair()
            self._owner, self._environment = os.getpid(), own_environment()
            command = [sys.executable, __file__, str(theirs.fileno())]
            subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            theirs.close()
            atexit.register(self._socket.close)
        return self._socket


warm = WarmProcess()
"""The one that the tests share."""


def _given(stdin: str | None) -> IO[bytes]:
    if stdin is None:
        return Path(os.devnull).open("rb")
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by whoever asked
    file.write(stdin.encode(errors="surrogateescape"))
    file.seek(0)
    return file


def own_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OURS_ALONE}


def _number(connection: socket.socket) -> int:
    data = connection.recv(4, socket.MSG_WAITALL)
    if len(data) < 4:
        raise EOFError("the other side is gone")
    return int.from_bytes(data, "big", signed=True)


def _serve(connection: socket.socket) -> tuple[str | None, list[str]]:
    """Fork for every command that comes; returns in the new process, with its streams in place."""
    while True:
        try:
            header, files, _, _ = socket.recv_fds(connection, 4, 4)
        except ConnectionError:
            sys.exit()
        if len(header) < 4:
            sys.exit()
        message = connection.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL)
        if os.fork() == 0:
            connection.close()
            _watch_a_fork(socket.socket(fileno=files.pop()))
            return _as_told(json.loads(message), files)
        for file in files:
            os.close(file)
        while _reaped():
            pass


def _reaped() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _watch_a_fork(status: socket.socket) -> None:
    """Return in a new process; the process that was called tells that one's number and exit code, and ends."""
    pid = os.fork()
    if pid == 0:
        status.close()
        return
    for number in range(3):
        os.close(number)  # whoever reads what the command writes waits for its end, not for ours
    try:
        status.sendall(pid.to_bytes(4, "big", signed=True))
        _, code = os.waitpid(pid, 0)
        status.sendall(os.waitstatus_to_exitcode(code).to_bytes(4, "big", signed=True))
    finally:
        os._exit(0)


def _as_told(message: list[Any], files: Sequence[int]) -> tuple[str | None, list[str]]:
    folder, environment, program, arguments = message
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    is_same = all(os.environ.get(name) == environment.get(name) for name in _OF_THE_TERMINAL)
    os.environ.clear()
    os.environ.update(environment)
    if not is_same:
        from foreword.cli import console

        for output, is_stderr in ((console.stdout, False), (console.stderr, True)):
            output.__init__(stderr=is_stderr, highlight=False)  # type: ignore[misc] - it has read the old ones
    return program, arguments


def _fork_instead_of_exec() -> None:
    """Let `subprocess` start modules of this package by a fork: they are here already.

    Not if this process has called CUDA, even only to count devices: its forks cannot use it. They start afresh.
    """
    import torch

    start = subprocess.Popen.__init__

    def __init__(self: Any, args: Any, *more: Any, **options: Any) -> None:  # noqa: N807
        command = [args] if isinstance(args, str) else [str(arg) for arg in args]
        if command[:2] == [sys.executable, "-m"] and command[2].split(".")[0] == "foreword":
            kept, environment = options.get("pass_fds", ()), options.get("env")
            modules = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])
            options["env"] = {**(os.environ if environment is None else environment), "PYTHONPATH": modules}
            options["preexec_fn"] = lambda: (
                torch.cuda._is_in_bad_fork() or _become(command[2], command[3:], kept, environment)
            )
        start(self, args, *more, **options)

    subprocess.Popen.__init__ = __init__  # type: ignore[method-assign]


def _become(
    module: str, arguments: Sequence[str], kept: Collection[int], environment: Mapping[str, str] | None
) -> NoReturn:
    """Run the module in a process that has just been forked, with these files and no others."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if file > 2 and file not in kept and file != nothing:
            with suppress(OSError):  # the one that the list was read from
                os.dup2(nothing, file)  # not closed: objects of the other process may close it later
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    logging.root.handlers.clear()
    atexit._clear()
    from foreword.cli import console

    console.stdout.stderr = False  # a command with --json has turned it, and the new one has not
    sys.argv[1:] = arguments
    sys.modules.pop(module if "." in module else f"{module}.__main__", None)  # it runs again, as the main one
    _run_and_end(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))


def _run_and_end(run: Callable[[], object]) -> NoReturn:
    """End the process after it without taking all modules apart, which takes longer than most commands."""
    code: Any = 1
    try:
        run()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    import typer.main

    import foreword.bench.drafters.measure
    import foreword.engine.engine
    import foreword.server.app
    import foreword.train.loop.run
    import foreword.wire.process  # noqa: F401 - so that no command has to
    from foreword.cli.main import app, main
    from foreword.drafters.registry import drafter_kinds
    from helpers.quick_starts import prepare_quick_starts

    prepare_quick_starts()
    drafter_kinds()  # which imports them
    typer.main.get_command(app)
    gc.freeze()  # what is there is not looked at again when a command ends
    text, sys.argv[1:] = _serve(socket.socket(fileno=int(sys.argv[1])))
    _fork_instead_of_exec()
    if text is None:
        sys.argv[0] = "foreword"
        _run_and_end(main)
    else:
        sys.argv[0] = "-c"
        gc.unfreeze()
        exec(compile(text, "<string>", "exec"))  # in this module, which the interpreter's end empties first
