"""From a request that shows a fault to the smallest one that does."""

from collections.abc import Awaitable, Callable

from foreword.proofs.server.abilities import FILTERS_OFF
from foreword.proofs.server.client import Body, Broken, Refused

MOST_TRIES = 16
"""Requests (or comparisons) that finding a small one may cost."""


async def smallest(body: Body, shows: Callable[[Body], Awaitable[bool]]) -> Body:
    """The body with fewer tokens and fewer words as long as it still shows the fault."""
    tries = MOST_TRIES

    async def still(smaller: Body) -> bool:
        nonlocal tries
        tries -= 1
        try:
            return tries >= 0 and await shows(smaller)
        except (Broken, Refused):
            return False

    tokens = 1
    while tokens < body.get("max_tokens", 1):
        if await still(smaller := {**body, "max_tokens": tokens}):
            body = smaller
            break
        tokens *= 2
    for unneeded in ({"logprobs"}, FILTERS_OFF.keys()):
        smaller = {name: value for name, value in body.items() if name not in unneeded}
        if smaller != body and await still(smaller):
            body = smaller
    words = body["prompt"].split(" ") if isinstance(body["prompt"], str) else []
    while len(words) > 1:
        words = words[len(words) // 2 :]
        if not await still(smaller := {**body, "prompt": " ".join(words)}):
            break
        body = smaller
    return body
