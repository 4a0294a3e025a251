"""A program on a terminal of its own, as someone at a keyboard has it."""

import os
import pty
import select
import signal
import sys
from time import monotonic

CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """Starts `foreword` on a pseudo-terminal; use it in a `with`."""

    def __init__(self, *arguments: str, **env: str) -> None:
        self.screen = ""  # all that was written so far
        self._seen = 0
        self._code: int | None = None
        command = [sys.executable, "-m", "foreword", *arguments]
        self._pid, self._master = pty.fork()
        if self._pid == 0:
            os.execve(command[0], command, {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200", **env})

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self._code is None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._master)

    def send(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, text: str, seconds: float = 120) -> str:
        """Read on until the text comes; returns all that came since the last wait, with it."""
        deadline = monotonic() + seconds
        while (found := self.screen.find(text, self._seen)) < 0:
            if not self._read(deadline - monotonic()):
                raise AssertionError(f"{text!r} did not come; the screen has {self.screen!r}")
        begin, self._seen = self._seen, found + len(text)
        return self.screen[begin : self._seen]

    def press_until(self, keys: str, text: str) -> None:
        """Press again while the text does not come: at a prompt, Python misses a signal just before it waits."""
        for _ in range(30):
            self.send(keys)
            try:
                self.wait_for(text, seconds=1)
            except AssertionError:
                continue
            return
        self.wait_for(text)

    def wait_for_end(self, seconds: float = 60) -> int:
        """Read on until the program ends; returns its exit code."""
        deadline = monotonic() + seconds
        while self._read(deadline - monotonic()):
            pass
        _, status = os.waitpid(self._pid, 0)
        self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def _read(self, seconds: float) -> bool:
        """False: nothing came in that time, or nothing will."""
        ready, _, _ = select.select([self._master], [], [], max(seconds, 0))
        if not ready:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # how Linux says that the other side is closed
            return False
        self.screen += data.decode(errors="replace")
        return bool(data)
