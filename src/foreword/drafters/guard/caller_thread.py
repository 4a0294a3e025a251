"""Calls with a time limit, in a thread that can be left behind."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic
from typing import Any, TypeVar

from foreword.drafters.guard.guarded import NoAnswer

_Answer = TypeVar("_Answer")

REST_FACTOR = 10
"""After a call that took too long, nothing is asked for this many times the limit, and twice as long each time."""

LONGEST_REST = 300.0
"""Seconds after which a drafter that took too long is tried again at the latest."""


class _Call:
    """Work for the thread, and what became of it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.is_done = threading.Event()
        self.answer: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.answer = self._work()
        except BaseException as error:  # it is raised where the answer is waited for
            self.error = error
        finally:
            self.is_done.set()


class CallerThread:
    """Makes one call at a time. While one hangs, nothing is asked; what it says when it comes back is too late.

    A drafter that keeps being late costs everyone its time limit, so it is asked ever less often. The thread is a
    daemon: a call that never comes back keeps no process alive.
    """

    def __init__(self, name: str, time_limit: float, clock: Callable[[], float] = monotonic) -> None:
        self._time_limit = time_limit
        self._clock = clock
        self._stuck: _Call | None = None
        self._lateness = 0  # late calls of late
        self._rests_until = float("-inf")
        self._work: SimpleQueue[_Call | None] = SimpleQueue()
        self._is_closed = False
        threading.Thread(target=_serve, args=(self._work,), name=f"drafter-{name}", daemon=True).start()

    @property
    def is_available(self) -> bool:
        """Whether a call would be made."""
        if self._stuck is not None and self._stuck.is_done.is_set():
            self._stuck = None
        return not self._is_closed and self._stuck is None and self._clock() >= self._rests_until

    def call(self, work: Callable[[], _Answer]) -> _Answer:
        """What the work returns, within the limit."""
        if not self.is_available:
            raise NoAnswer
        call = _Call(work)
        self._work.put(call)
        if not call.is_done.wait(self._time_limit):
            self._stuck = call
            self._late()
            raise NoAnswer(f"no answer within {self._time_limit:g} s")
        self._lateness = max(self._lateness - 1, 0)
        if isinstance(
            call.error, KeyboardInterrupt
        ):  # Ctrl-C comes to the main thread alone: it is the drafter's
            raise RuntimeError("it raised KeyboardInterrupt") from call.error
        if call.error is not None:
            raise call.error
        answer: _Answer = call.answer
        return answer

    def _late(self) -> None:
        self._lateness += 1
        rest = self._time_limit * REST_FACTOR * 2 ** min(self._lateness - 1, 16)
        self._rests_until = self._clock() + min(rest, LONGEST_REST)

    def later(self, work: Callable[[], object]) -> None:
        """Do it after what is stuck; nobody waits for it."""
        if not self._is_closed:
            self._work.put(_Call(work))

    def close(self) -> None:
        """The thread ends when it is done with what it does now."""
        self._is_closed = True
        self._work.put(None)


def _serve(work: "SimpleQueue[_Call | None]") -> None:
    while (call := work.get()) is not None:
        call.run()
        del call  # or the last one would be kept until the next comes
