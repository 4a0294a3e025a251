"""The targets of a router: state, known prefixes, and selection."""

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
"""A target with a known prefix is preferred unless its load exceeds this multiple of the mean, plus this many."""


@dataclass
class RoutedTarget:
    """One target as the router knows it."""

    url: str
    state: str = "unknown"  # "ready", the target's own state, or "down"
    reason: str = ""
    in_flight: int = 0  # requests of this router
    answered: int = 0
    reported_load: int = 0  # load that it reported last
    reported_at: int = 0  # `in_flight` at that time

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def load(self) -> int:
        """The target's load: as reported, adjusted by this router's changes since."""
        return max(self.reported_load + self.in_flight - self.reported_at, self.in_flight, 0)

    def mark_ready(self, load: int | None) -> None:
        """Record that it accepts requests, with its load; None: unknown."""
        self.state, self.reason = "ready", ""
        self.reported_load, self.reported_at = (self.in_flight if load is None else load), self.in_flight

    def mark_unavailable(self, state: str, reason: str = "") -> None:
        self.state, self.reason = state, reason

    @contextmanager
    def serving(self) -> Iterator[None]:
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Targets:
    """All targets; a new one is used once it is ready."""

    def __init__(self, given: str) -> None:
        """Parse comma-separated addresses, or @FILE with one per line, which is re-read."""
        self._file = Path(given.removeprefix("@")) if given.startswith("@") else None
        self._known: dict[str, RoutedTarget] = {}
        self._complaint = ""  # file error, logged once
        self.set(_lines(self._file) if self._file is not None else given.split(","))
        if not self._known and self._file is None:
            raise RequestError("--targets must name at least one target: host:port,host:port")

    def __iter__(self) -> Iterator[RoutedTarget]:
        return iter(list(self._known.values()))

    def set(self, addresses: Collection[str]) -> None:
        urls = [target_url(one.strip()) for one in addresses if one.strip()]
        self._known = {url: self._known.get(url) or RoutedTarget(url) for url in urls}

    def read_again(self) -> None:
        if self._file is not None:
            try:
                self.set(_lines(self._file))
                self._complaint = ""
            except RequestError as error:
                if str(error) != self._complaint:
                    _log.warning("%s; the targets stay as they were", error)
                self._complaint = str(error)

    def choose(self, preferred: str | None, tried: Collection[str] = ()) -> RoutedTarget | None:
        """Return the target with the prompt's prefix unless overloaded, otherwise the least loaded."""
        ready = [target for target in self if target.is_ready and target.url not in tried]
        if not ready:
            return None
        known = self._known.get(preferred or "")
        if known in ready and known is not None and known.load <= _most(ready):
            return known
        return min(ready, key=lambda target: (target.load, target.answered))


def target_url(text: str) -> str:
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
"""Seconds between two checks of a target."""

PROBE_SECONDS = 5.0
"""Timeout of a check in seconds."""


class TargetWatch:
    """Checks all targets periodically."""

    def __init__(self, targets: Targets, client: httpx2.AsyncClient, api_key: str = "") -> None:
        self._targets = targets
        self._client = client
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def run(self) -> None:
        while True:
            await self.poll()
            await asyncio.sleep(CHECK_SECONDS)

    async def poll(self) -> None:
        self._targets.read_again()
        await asyncio.gather(*(self._poll_target(target) for target in self._targets))

    async def _poll_target(self, target: RoutedTarget) -> None:
        try:
            ready = await self._client.get(f"{target.url}/ready", timeout=PROBE_SECONDS)
            if ready.status_code == 200:
                url = f"{target.url}/health"
                health = await self._client.get(url, headers=self._headers, timeout=PROBE_SECONDS)
                target.mark_ready(_load(health.json()))
            else:
                target.mark_unavailable(str(ready.json().get("status", ready.status_code)))
        except httpx2.HTTPError as error:
            target.mark_unavailable("down", error_words(error))
        except (ValueError, AttributeError, TypeError):
            target.mark_unavailable("down", "it does not answer as a target does")


def _load(health: dict[str, Any]) -> int | None:
    engine = health.get("engine")
    return None if engine is None else int(engine["running"]) + int(engine["waiting"])


BLOCK = 512
"""Characters per key: prefixes are known in whole blocks, as targets cache whole pages."""

MOST_BLOCKS = 64
"""Maximum blocks per prompt."""

MOST_TENANTS = 256
MOST_PREFIXES = 2048
"""Maximum prefixes per tenant: a busy tenant evicts only its own."""


class PrefixMemory:
    """Targets by the prefixes that they have read.

    Keys are hashes with the tenant and a process secret. So equal prefixes of two tenants are unrelated, and neither
    routing nor latency reveals another tenant's texts.
    """

    def __init__(self) -> None:
        self._secret = token_bytes(32)
        self._tenants: OrderedDict[bytes, OrderedDict[bytes, str]] = OrderedDict()

    def keys(self, tenant: bytes, prompt: str) -> "PrefixKeys":
        """Return the keys of all prefixes in whole blocks, longest last."""
        owner = key = blake2b(tenant, key=self._secret, digest_size=16).digest()
        found = []
        for begin in range(0, min(len(prompt), MOST_BLOCKS * BLOCK) - BLOCK + 1, BLOCK):
            block = prompt[begin : begin + BLOCK].encode("utf-8", "surrogatepass")
            key = blake2b(key + block, key=self._secret, digest_size=16).digest()
            found.append(key)
        return PrefixKeys(owner, found)

    def find(self, prefixes: "PrefixKeys") -> str | None:
        known = self._tenants.get(prefixes.owner, OrderedDict())
        return next((known[key] for key in reversed(prefixes.keys) if key in known), None)

    def note(self, prefixes: "PrefixKeys", target: str) -> None:
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
    """Prefix keys of one tenant's prompt."""

    owner: bytes
    keys: Sequence[bytes]


def prompt_of(body: bytes) -> str:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return ""  # the target reports the error
    if not isinstance(given, Mapping):
        return ""
    content = next((given[key] for key in ("messages", "prompt", "input") if key in given), None)
    if content is None:
        return ""
    frame = [given.get(key) for key in ("model", "instructions", "system", "tools")]
    parts = content if isinstance(content, list) else [content]
    return "\n".join(_text(part) for part in (frame, *parts))


def _text(value: Any) -> str:  # noqa: ANN401 - any JSON
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
