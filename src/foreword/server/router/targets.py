"""The targets of a router: their state, the prefixes that they have read, and which gets the next request."""

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from secrets import token_bytes
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2

from foreword.errors import RequestError
from foreword.wire.openai_http import error_words

_log = logging.getLogger("foreword.router")

LOAD_BOUND = 1.25
LOAD_SLACK = 2
"""A target that knows a prompt's beginning gets it unless it has so many times the usual load, and so many more."""


@dataclass
class RoutedTarget:
    """One server, as far as this router knows."""

    url: str
    state: str = "unknown"  # "ready", or what it says of itself, or "down"
    reason: str = ""
    in_flight: int = 0  # requests of this router
    answered: int = 0
    reported_load: int = 0  # requests that it had by its own account, when it was last asked
    reported_at: int = 0  # `in_flight` at that time

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def load(self) -> int:
        """Requests that it has: what it said, and what has changed here since; others may send it some, too."""
        return max(self.reported_load + self.in_flight - self.reported_at, self.in_flight, 0)

    def hear(self, load: int | None) -> None:
        """It takes requests, and has so many; None: it does not say."""
        self.state, self.reason = "ready", ""
        self.reported_load, self.reported_at = (self.in_flight if load is None else load), self.in_flight

    def refuse(self, state: str, reason: str = "") -> None:
        self.state, self.reason = state, reason

    @contextmanager
    def serving(self) -> Iterator[None]:
        """While a request is there."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Targets:
    """All targets; a new one is used once it reports that it is ready."""

    def __init__(self, given: str) -> None:
        """Addresses with commas, or @FILE with one in a line, which is read again and again."""
        self._file = Path(given.removeprefix("@")) if given.startswith("@") else None
        self._known: dict[str, RoutedTarget] = {}
        self._complaint = ""  # of the file, logged once
        self.set(_lines(self._file) if self._file is not None else given.split(","))
        if not self._known and self._file is None:
            raise RequestError("--targets must name at least one target: host:port,host:port")

    def __iter__(self) -> Iterator[RoutedTarget]:
        return iter(list(self._known.values()))

    def set(self, addresses: Collection[str]) -> None:
        """Use these targets and no others; requests in flight on others continue."""
        urls = [target_url(one.strip()) for one in addresses if one.strip()]
        self._known = {url: self._known.get(url) or RoutedTarget(url) for url in urls}

    def read_again(self) -> None:
        """As the file says now; a file that cannot be read changes nothing."""
        if self._file is not None:
            try:
                self.set(_lines(self._file))
                self._complaint = ""
            except RequestError as error:
                if str(error) != self._complaint:
                    _log.warning("%s; the targets stay as they were", error)
                self._complaint = str(error)

    def choose(self, preferred: str | None, tried: Collection[str] = ()) -> RoutedTarget | None:
        """The one that knows the prompt's beginning, unless it has too much to do; else the one with the least."""
        ready = [target for target in self if target.is_ready and target.url not in tried]
        if not ready:
            return None
        known = self._known.get(preferred or "")
        if known in ready and known is not None and known.load <= _most(ready):
            return known
        return min(ready, key=lambda target: (target.load, target.answered))


def target_url(text: str) -> str:
    """`host:port`, or a URL without a path."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and parts.hostname and parts.port
    except ValueError:
        is_usable = None
    if not is_usable or parts.path.rstrip("/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise RequestError(f"a target's address is HOST:PORT, not {text!r}")
    return f"{parts.scheme}://{parts.netloc}"


def _most(ready: Sequence[RoutedTarget]) -> float:
    return LOAD_BOUND * sum(target.load for target in ready) / len(ready) + LOAD_SLACK


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the list of targets cannot be read: {error}") from None


CHECK_SECONDS = 1.0
"""Between two looks at a target."""

PATIENCE = 5.0
"""Seconds that a target has to say how it is."""


class TargetWatch:
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

    async def _look_at(self, target: RoutedTarget) -> None:
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


BLOCK = 512
"""Characters of a prompt that are one key: a beginning is known in whole blocks, as targets keep it in whole pages."""

MOST_BLOCKS = 64
"""Blocks of one prompt; later ones are on the same target anyway."""

MOST_TENANTS = 256
MOST_PREFIXES = 2048
"""Prefixes per tenant: a busy tenant evicts its own, not those of others."""


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


class PrefixKeys(NamedTuple):
    """The beginnings of one prompt of one tenant."""

    owner: bytes
    keys: Sequence[bytes]


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
    frame = [given.get(key) for key in ("model", "instructions", "system", "tools")]
    parts = asked if isinstance(asked, list) else [asked]
    return "\n".join(_text(part) for part in (frame, *parts))


def _text(value: Any) -> str:  # noqa: ANN401 - any JSON
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
