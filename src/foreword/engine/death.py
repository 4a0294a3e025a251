"""The end of an engine's thread that nobody asked for."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from foreword.errors import EngineStopped

_log = logging.getLogger(__name__)


@dataclass
class Death:
    """Who hears of it, and in which words."""

    _tell: Callable[[Exception], None] | None = None
    _stopped: EngineStopped | None = None

    def tell(self, tell: Callable[[Exception], None]) -> None:
        """Have it told in the engine's thread, or here if it is dead already."""
        self._tell = tell
        if self._stopped is not None:
            tell(self._stopped)

    def by(self, error: BaseException) -> EngineStopped:
        """What all who wait are told."""
        is_clear = isinstance(error, EngineStopped)  # one line says all
        _log.critical("the engine's thread has died: %s", error, exc_info=None if is_clear else error)
        stopped = EngineStopped(
            f"the engine has failed: {error if is_clear else f'{type(error).__name__}: {error}'}"
        )
        self._stopped = stopped
        if self._tell is not None:
            self._tell(stopped)
        return stopped


def give_up(reason: str) -> None:
    """In the engine's thread: what it needs is gone."""
    raise EngineStopped(reason)
