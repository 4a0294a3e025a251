"""Who is there: the one place that all members of a cluster know by name."""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

SILENT_SECONDS = 10.0
"""A member that nothing was heard of for so long is not there."""


@dataclass
class _Heard:
    told: dict[str, Any]
    at: float


class Registry:
    """Members say again and again that they are there, so that a registry that was started again knows all soon."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._heard: dict[str, _Heard] = {}

    def tell(self, told: dict[str, Any]) -> list[dict[str, Any]]:
        """A member is there; whoever says so hears who else is."""
        self._heard[told["name"]] = _Heard(told, self._clock())
        return self.members()

    def leave(self, name: str) -> None:
        """It is going: nobody is sent there any more."""
        self._heard.pop(name, None)

    def members(self) -> list[dict[str, Any]]:
        now = self._clock()
        return [one.told for one in self._heard.values() if now - one.at <= SILENT_SECONDS]
