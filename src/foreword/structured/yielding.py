"""Threads that compute grammars yield the processor to passes: others wait for the passes."""

import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread, get_native_id
from typing import TypeVar

T = TypeVar("T")

NICENESS = 10
"""Niceness of such threads: beside passes on all cores they get about a tenth of one."""


def yield_to_passes() -> None:
    """Lower the priority of this thread for the rest of its life; threads have one of their own on Linux alone."""
    if sys.platform == "linux":
        thread = get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), NICENESS))


def in_yielding_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread of low priority and return what it returns: a priority cannot be raised again."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            yield_to_passes()
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    Thread(target=run, name="foreword-grammar", daemon=True).start()
    return result.result()
