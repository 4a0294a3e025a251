"""Cancellation of long work in another thread: the work checks between its parts whether it is still wanted."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event

from foreword.errors import EngineStopped

_NEVER = Event()
_cancelled: ContextVar[Event] = ContextVar("cancelled", default=_NEVER)


@contextmanager
def cancelled_by(event: Event) -> Iterator[None]:
    """Have `check_cancelled` raise in this thread, within the block, once `event` is set."""
    token = _cancelled.set(event)
    try:
        yield
    finally:
        _cancelled.reset(token)


def check_cancelled() -> None:
    """Raise `EngineStopped` if the engine that this thread works for was closed."""
    if _cancelled.get().is_set():
        raise EngineStopped("the engine is closed")
