"""Wait for what will happen, however long it takes; a limit is there only to end a test that hangs."""

import asyncio
import time
from collections.abc import Callable

PATIENCE = 120.0
"""Seconds after which nothing is expected any more."""


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "what was waited for has not happened"
        time.sleep(0.01)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)
