"""Asks every target again and again whether it takes requests, and how many it has."""

import asyncio
from typing import Any

import httpx2

from foreword.server.router.targets import Target, Targets
from foreword.wire.openai_http import error_words

CHECK_SECONDS = 1.0
"""Between two looks at a target."""

PATIENCE = 5.0
"""Seconds that a target has to say how it is."""


class Watch:
    """One look after the other, at all targets at once."""

    def __init__(self, targets: Targets, client: httpx2.AsyncClient, api_key: str = "") -> None:
        self._targets = targets
        self._client = client
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(CHECK_SECONDS)

    async def look(self) -> None:
        self._targets.read_again()
        await asyncio.gather(*(self._look_at(target) for target in self._targets))

    async def _look_at(self, target: Target) -> None:
        try:
            ready = await self._client.get(f"{target.url}/ready", timeout=PATIENCE)
            if ready.status_code == 200:
                health = await self._client.get(
                    f"{target.url}/health", headers=self._headers, timeout=PATIENCE
                )
                target.hear(_load(health.json()))
            else:
                target.refuse(str(ready.json().get("status", ready.status_code)))
        except httpx2.HTTPError as error:
            target.refuse("down", error_words(error))
        except (ValueError, AttributeError, TypeError):
            target.refuse("down", "it does not answer as a target does")


def _load(health: dict[str, Any]) -> int | None:
    engine = health.get("engine")
    return None if engine is None else int(engine["running"]) + int(engine["waiting"])
