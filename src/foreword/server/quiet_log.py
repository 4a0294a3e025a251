"""A log that others cannot fill: what they can cause at will is one line a minute."""

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import Any

_INTERVAL = 60.0  # seconds between two lines that say the same
_NOISY = ("uvicorn.error", "foreword.server.connections")

log = logging.getLogger("foreword.server.connections")


class OncePerMinute(logging.Filter):
    """Lets a message through once a minute, with the number of those that it held back."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._last: dict[str, float] = {}
        self._held: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        kind, now = str(record.msg), self._clock()
        if now - self._last.get(kind, -_INTERVAL) < _INTERVAL:
            self._held[kind] = self._held.get(kind, 0) + 1
            return False
        self._last[kind] = now
        if held := self._held.pop(kind, 0):
            record.msg = f"{kind.rstrip()} ({held} more like this since the last such line)"
        return True


def quieten() -> None:
    """Bound what clients can make the server write."""
    for name in _NOISY:
        logger = logging.getLogger(name)
        if not any(isinstance(known, OncePerMinute) for known in logger.filters):
            logger.addFilter(OncePerMinute())


def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Failures to accept a connection are a line, not a traceback each."""
    error = context.get("exception")
    if isinstance(error, OSError) and "accept" in str(context.get("message", "")):
        log.warning("a connection could not be accepted: %s", error)
    else:
        loop.default_exception_handler(context)
