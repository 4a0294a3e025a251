"""Notices an engine process that is alive and does nothing."""

import asyncio
from typing import Protocol

from foreword.engine.messages import EngineStats

LONGEST_INTERVAL = 5.0
"""Most seconds between two looks."""

LOOKS = 4
"""Looks within an engine's patience: this many in a row must find nothing before it counts as hung."""


class Watched(Protocol):
    """A link to an engine process."""

    @property
    def awaited(self) -> int:
        """Requests whose end has not come."""
        ...

    async def stats(self, timeout: float) -> EngineStats | None:
        """How it is doing; None if it does not say in time."""
        ...


async def wait_until_hung(link: Watched, patience: float) -> None:
    """Return when the engine has given no sign of life for this many seconds.

    A sign of life is an answer that tells of steps since the last one, or any answer while nothing is to be done.
    """
    interval = min(patience / LOOKS, LONGEST_INTERVAL)
    clock = asyncio.get_running_loop().time
    steps, last_sign = -1, clock()
    while clock() - last_sign < patience:
        await asyncio.sleep(interval / 2)
        stats = await link.stats(interval / 2)
        if stats is not None and (stats.steps != steps or not link.awaited):
            steps, last_sign = stats.steps, clock()
