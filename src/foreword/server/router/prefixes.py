"""Which target has read the beginning of a prompt before, for one tenant at a time."""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from secrets import token_bytes
from typing import Any

BLOCK = 512
"""Characters of a prompt that are one key: a beginning is known in whole blocks, as targets keep it in whole pages."""

MOST_BLOCKS = 64
"""Of one prompt; what comes behind them is on the same target anyway."""

MOST_TENANTS = 256
MOST_PREFIXES = 2048
"""That are remembered of each tenant: whoever asks much forgets their own, not others'."""


class PrefixMemory:
    """Keys are hashes with the tenant, and with a secret of this process: equal beginnings of two tenants have nothing
    in common, so that neither where a request goes nor how soon it is answered tells one of the other's texts."""

    def __init__(self) -> None:
        self._secret = token_bytes(32)
        self._tenants: OrderedDict[bytes, OrderedDict[bytes, str]] = OrderedDict()

    def keys(self, tenant: bytes, prompt: str) -> "PrefixKeys":
        """Of every beginning in whole blocks, the longest last."""
        owner = key = blake2b(tenant, key=self._secret, digest_size=16).digest()
        found = []
        for begin in range(0, min(len(prompt), MOST_BLOCKS * BLOCK) - BLOCK + 1, BLOCK):
            block = prompt[begin : begin + BLOCK].encode("utf-8", "surrogatepass")
            key = blake2b(key + block, key=self._secret, digest_size=16).digest()
            found.append(key)
        return PrefixKeys(owner, found)

    def find(self, prefixes: "PrefixKeys") -> str | None:
        """The target that has seen the longest beginning."""
        known = self._tenants.get(prefixes.owner, OrderedDict())
        return next((known[key] for key in reversed(prefixes.keys) if key in known), None)

    def note(self, prefixes: "PrefixKeys", target: str) -> None:
        """A target has read this prompt."""
        if not prefixes.keys:
            return
        known = self._tenants.setdefault(prefixes.owner, OrderedDict())
        self._tenants.move_to_end(prefixes.owner)
        for key in prefixes.keys:
            known[key] = target
            known.move_to_end(key)
        while len(known) > MOST_PREFIXES:
            known.popitem(last=False)
        while len(self._tenants) > MOST_TENANTS:
            self._tenants.popitem(last=False)


class PrefixKeys:
    """The beginnings of one prompt of one tenant."""

    def __init__(self, owner: bytes, keys: Sequence[bytes]) -> None:
        self.owner = owner
        self.keys = keys


def prompt_of(body: bytes) -> str:
    """What a target would read, in its order; empty for what is no request for an answer."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return ""  # the target says what is wrong with it
    if not isinstance(given, Mapping):
        return ""
    asked = next((given[key] for key in ("messages", "prompt", "input") if key in given), None)
    if asked is None:
        return ""
    frame = [given.get("model"), given.get("instructions"), given.get("tools")]
    parts = asked if isinstance(asked, list) else [asked]
    return "\n".join(_text(part) for part in (frame, *parts))


def _text(value: Any) -> str:  # noqa: ANN401 - any JSON
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
