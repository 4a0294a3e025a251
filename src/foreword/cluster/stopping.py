"""Being asked to stop."""

import signal
import time

_SLICE = 0.1


class Stopping:
    """Whether somebody, or a signal, has asked for the end.

    A signal's handler may interrupt anything, also another call of itself: an `Event`, whose lock is held then, would
    wait for itself. So there is no lock.
    """

    def __init__(self) -> None:
        self._is_asked = False

    def listen(self) -> "Stopping":
        """To SIGTERM and SIGINT, which may come more than once."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.set())
        return self

    def set(self) -> None:
        self._is_asked = True

    def is_set(self) -> bool:
        return self._is_asked

    def wait(self, seconds: float = float("inf")) -> bool:
        """Until it is asked, but not longer than this; whether it is."""
        until = time.monotonic() + seconds
        while not self._is_asked and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _SLICE))
        return self._is_asked
