"""Computes the masks of slow grammars between passes, so that no pass waits for them."""

import logging
from threading import Condition, Event, Thread
from typing import Protocol

from foreword.structured.yielding import yield_to_passes

log = logging.getLogger("foreword.structured")


class Preparing(Protocol):
    """An answer whose next mask is to be computed."""

    @property
    def used(self) -> float:
        """Seconds of a processor that its masks have taken."""
        ...

    def prepare(self) -> None:
        """Compute the next mask."""
        ...


class MaskWorker:
    """One thread, which starts with the first mask. It takes the answer that has used the least time first."""

    def __init__(self) -> None:
        self._waiting: list[Preparing] = []
        self._changed = Condition()
        self._thread: Thread | None = None
        self._is_closed = False
        self._done = Event()

    def put(self, answer: Preparing) -> None:
        """Have the next mask of an answer computed."""
        with self._changed:
            self._waiting.append(answer)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="foreword-masks", daemon=True)
                self._thread.start()
            self._changed.notify()

    def wait(self, seconds: float) -> None:
        """Wait until a mask was computed since the last call, at most so long."""
        self._done.wait(seconds)
        self._done.clear()

    def close(self) -> None:
        """End the thread once its mask is computed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        yield_to_passes()
        while True:
            with self._changed:
                while not self._waiting and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                answer = min(self._waiting, key=lambda waiting: waiting.used)
                self._waiting.remove(answer)
            try:
                answer.prepare()
            except BaseException:  # the parser's panics too: the thread must go on for the others
                log.exception("a mask could not be computed; the next pass tries again")
            del answer  # an answer that has ended is not kept until the next one comes
            self._done.set()
