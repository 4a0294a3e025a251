"""Cooperative cancellation of long work in another thread."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event

from foreword.errors import EngineStopped

_NEVER = Event()
_cancelled: ContextVar[Event] = ContextVar("cancelled", default=_NEVER)


@contextmanager
def cancelled_by(event: Event) -> Iterator[None]:
    """Let `check_cancelled` raise in this thread, within the block, once `event` is set."""
    token = _cancelled.set(event)
    try:
        yield
    finally:
        _cancelled.reset(token)


def check_cancelled() -> None:
    """Raise `EngineStopped` if the engine of this thread was closed."""
    if _cancelled.get().is_set():
        raise EngineStopped("the engine is closed")
