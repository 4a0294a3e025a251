"""Runs a learner's slow work in a thread of its own, so that the engine's steps are not delayed."""

import atexit
import logging
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread

_log = logging.getLogger(__name__)

CLOSE_SECONDS = 60.0
"""Maximum wait in seconds for the work of a closed learner: a full disk or a network directory may block it."""


class OrderedWork:
    """Runs functions one after another, in the order in which they were added.

    The order guarantees that texts which were stored before a deletion are deleted. The thread lives until `close`:
    a training ends with the thread that started it.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = Lock()
        self._thread: Thread | None = None
        self._is_closed = False
        atexit.register(self.close)

    def add(self, work: Callable[[], None]) -> None:
        """Run `work` after all that was added before; after `close`, it is not run."""
        with self._lock:
            if self._is_closed:
                return
            self._queue.put(work)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="foreword-learn", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception as error:  # the thread must go on: later work deletes texts
                _log.error("learning: work in the background failed: %s", error, exc_info=error)

    def close(self) -> None:
        """Finish all work, and wait for it at most `CLOSE_SECONDS`; safe to repeat."""
        with self._lock:
            self._is_closed = True
            thread, self._thread = self._thread, None
        atexit.unregister(self.close)
        if thread is not None:
            self._queue.put(None)
            thread.join(CLOSE_SECONDS)
            if thread.is_alive():
                _log.warning("learning: the work in the background has not ended after %g s", CLOSE_SECONDS)
