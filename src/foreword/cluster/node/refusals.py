"""Logs refused connections at a bounded rate: a peer with a wrong token connects again and again."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

_log = logging.getLogger(__name__)

REPEAT_SECONDS = 600.0
"""Between two lines about the same host and reason."""

MOST_KNOWN = 256
"""Pairs of host and reason with lines of their own; all others share one, as peers can make up reasons."""

_OTHERS = ("other hosts", "several reasons")


@dataclass
class _Repeated:
    """One pair of host and reason."""

    logged_at: float
    held_back: int = 0  # refusals since the last line


class RefusalLog:
    """Logs the first refusal of a host and reason at once, repetitions with their number. Any thread may call it."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._known: dict[tuple[str, str], _Repeated] = {}
        self._lock = threading.Lock()

    def note(self, host: str, reason: str) -> None:
        """Log a refusal, or count it for the next line."""
        with self._lock:
            now = self._clock()
            pair = (host, reason)
            if pair not in self._known and len(self._known) >= MOST_KNOWN:
                pair = _OTHERS
            known = self._known.get(pair)
            if known is not None and now - known.logged_at < REPEAT_SECONDS:
                known.held_back += 1
                return
            self._known[pair] = _Repeated(now)
        more = f" ({known.held_back} more since the last such line)" if known and known.held_back else ""
        _log.warning("target %s is not let in: %s%s", *pair, more)
