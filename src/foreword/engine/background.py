"""Threads that load drafters and compile grammars while the engine runs."""

import atexit
import logging
from collections.abc import Callable
from threading import Event, Lock, Thread
from time import monotonic

from foreword.cancellation import cancelled_by

_log = logging.getLogger(__name__)

CLOSE_SECONDS = 60.0
"""Maximum wait in seconds for the threads of a closed engine: compiled code cannot be interrupted."""


class BackgroundWork:
    """Runs functions in threads; `close` cancels them and waits.

    A thread that returns from compiled code after the interpreter has ended aborts the process. So `close` waits for
    all threads; it is also called at interpreter exit.
    """

    def __init__(self) -> None:
        self._cancelled = Event()
        self._lock = Lock()
        self._threads: list[Thread] = []
        atexit.register(self.close)

    def start(self, work: Callable[[], None], name: str = "foreword-prepare") -> None:
        """Run `work` in a new thread; after `close` nothing is started."""

        def run() -> None:
            with cancelled_by(self._cancelled):
                work()

        with self._lock:
            if self._cancelled.is_set():
                return
            thread = Thread(target=run, name=name, daemon=True)  # daemon: the exit cancels before it joins
            thread.start()
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]

    def close(self) -> None:
        """Cancel the work and wait for its threads, at most `CLOSE_SECONDS`; safe to repeat."""
        with self._lock:
            self._cancelled.set()
            threads = self._threads
        atexit.unregister(self.close)
        deadline = monotonic() + CLOSE_SECONDS
        for thread in threads:
            thread.join(max(deadline - monotonic(), 0.0))
            if thread.is_alive():
                _log.warning("%s has not ended %g s after the engine was closed", thread.name, CLOSE_SECONDS)
