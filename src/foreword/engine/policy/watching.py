"""Notices that a file has changed."""

from collections.abc import Callable
from pathlib import Path

WATCH_SECONDS = 1.0
"""Seconds between two checks of the file."""


class WatchedFile:
    """A file whose time and size are checked at most once every `WATCH_SECONDS`."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self.path = path
        self._clock = clock
        self._looked = clock()
        self._seen = self._signature()

    def has_changed(self) -> bool:
        """True once for every change."""
        now = self._clock()
        if now - self._looked < WATCH_SECONDS:
            return False
        self._looked = now
        found = self._signature()
        has_changed, self._seen = found != self._seen, found
        return has_changed and found is not None

    def _signature(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
