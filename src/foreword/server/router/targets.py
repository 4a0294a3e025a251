"""The targets of a router: their state, the prompt prefixes that they have cached, and their selection."""

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
"""The target that has a prompt's prefix is preferred while its load is at most LOAD_BOUND × mean load + LOAD_SLACK."""


@dataclass
class RoutedTarget:
    """State of one target."""

    url: str
    state: str = "unknown"  # "unknown", "ready", "down", or the state that the target reports
    reason: str = ""  # why it is down
    in_flight: int = 0  # requests that this router has forwarded and that are not answered yet
    answered: int = 0  # requests answered for this router
    reported_load: int = 0  # running and waiting requests, as the target reported last
    in_flight_at_report: int = 0  # `in_flight` at the time of that report

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def load(self) -> int:
        """The target's requests: as reported, plus the change of this router's requests since the report."""
        return max(self.reported_load + self.in_flight - self.in_flight_at_report, self.in_flight, 0)

    def mark_ready(self, load: int | None) -> None:
        """Record that the target accepts requests, and its load; None: unknown."""
        self.state, self.reason = "ready", ""
        self.reported_load = self.in_flight if load is None else load
        self.in_flight_at_report = self.in_flight

    def mark_unavailable(self, state: str, reason: str = "") -> None:
        self.state, self.reason = state, reason

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Count a request as in flight until the block ends."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Targets:
    """All targets of a router. A target receives requests once it is ready."""

    def __init__(self, given: str) -> None:
        """Parse comma-separated addresses, or read @FILE with one address per line, which `reload` reads again."""
        self._file = Path(given.removeprefix("@")) if given.startswith("@") else None
        self._by_url: dict[str, RoutedTarget] = {}
        self._last_file_error = ""  # logged once
        self.set(_addresses(self._file) if self._file is not None else given.split(","))
        if not self._by_url and self._file is None:
            raise RequestError("--targets must name at least one target: host:port,host:port")

    def __iter__(self) -> Iterator[RoutedTarget]:
        return iter(list(self._by_url.values()))

    def set(self, addresses: Collection[str]) -> None:
        """Replace the targets by those at these addresses; a target that stays keeps its state."""
        urls = [target_url(address.strip()) for address in addresses if address.strip()]
        self._by_url = {url: self._by_url.get(url) or RoutedTarget(url) for url in urls}

    def reload(self) -> None:
        """Read the file of addresses again; if that fails, log the error and keep the targets."""
        if self._file is not None:
            try:
                self.set(_addresses(self._file))
                self._last_file_error = ""
            except RequestError as error:
                if str(error) != self._last_file_error:
                    _log.warning("%s; the targets stay as they were", error)
                self._last_file_error = str(error)

    def choose(self, preferred_url: str | None, tried: Collection[str] = ()) -> RoutedTarget | None:
        """Return the preferred target unless it is overloaded, otherwise the least loaded one.

        Targets that are not ready or whose URLs are in `tried` are left out; None: no other target.
        """
        ready = [target for target in self if target.is_ready and target.url not in tried]
        if not ready:
            return None
        max_load = LOAD_BOUND * sum(target.load for target in ready) / len(ready) + LOAD_SLACK
        for target in ready:
            if target.url == preferred_url and target.load <= max_load:
                return target
        return min(ready, key=lambda target: (target.load, target.answered))


def target_url(text: str) -> str:
    """Return the URL of a target's address, HOST:PORT or a URL without path; raise `RequestError` for others."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and parts.hostname and parts.port
    except ValueError:  # the port is not a number
        is_usable = False
    if not is_usable or parts.path.rstrip("/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise RequestError(f"a target's address is HOST:PORT, not {text!r}")
    return f"{parts.scheme}://{parts.netloc}"


def _addresses(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the list of targets cannot be read: {error}") from None


CHECK_SECONDS = 1.0
"""Pause between two checks of the targets."""

PROBE_SECONDS = 5.0
"""Timeout of each HTTP request of a check."""


class TargetWatch:
    """Updates the state of all targets periodically."""

    def __init__(self, targets: Targets, client: httpx2.AsyncClient, api_key: str = "") -> None:
        self._targets = targets
        self._client = client
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def run(self) -> None:
        while True:
            await self.poll()
            await asyncio.sleep(CHECK_SECONDS)

    async def poll(self) -> None:
        """Reload the list of targets, and check each once."""
        self._targets.reload()
        await asyncio.gather(*(self._poll_target(target) for target in self._targets))

    async def _poll_target(self, target: RoutedTarget) -> None:
        """Update a target's state from its `/ready`, and its load from its `/health`."""
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
            target.mark_unavailable("down", "its answer is not that of a Foreword server")


def _load(health: dict[str, Any]) -> int | None:
    """Return the number of requests in a report of `/health`; None if it has no figures of the engine."""
    engine = health.get("engine")
    return None if engine is None else int(engine["running"]) + int(engine["waiting"])


BLOCK = 512
"""Characters per block of a prefix. A prefix consists of whole blocks, since targets cache whole pages."""

MOST_BLOCKS = 64
"""Maximum number of blocks per prompt."""

MOST_TENANTS = 256
MOST_PREFIXES = 2048
"""Maximum prefixes per tenant, so that a busy tenant evicts only its own prefixes."""


class PrefixMemory:
    """Remembers which target has answered a prompt with a given prefix.

    Keys are hashes of the prefix, the tenant and a secret of this process. So equal prefixes of two tenants have
    different keys, and neither routing nor latency reveals another tenant's texts.
    """

    def __init__(self) -> None:
        self._secret = token_bytes(32)
        # tenant -> prefix key -> target's URL; the least recently used tenant and key are first
        self._tenants: OrderedDict[bytes, OrderedDict[bytes, str]] = OrderedDict()

    def keys(self, tenant: bytes, prompt: str) -> "PrefixKeys":
        """Return the keys of all prefixes of the prompt, longest last. Each key is a hash of all blocks so far."""
        tenant_key = key = blake2b(tenant, key=self._secret, digest_size=16).digest()
        keys = []
        for begin in range(0, min(len(prompt), MOST_BLOCKS * BLOCK) - BLOCK + 1, BLOCK):
            block = prompt[begin : begin + BLOCK].encode("utf-8", "surrogatepass")
            key = blake2b(key + block, key=self._secret, digest_size=16).digest()
            keys.append(key)
        return PrefixKeys(tenant_key, keys)

    def find(self, prefixes: "PrefixKeys") -> str | None:
        """Return the URL of the target that has the longest of these prefixes; None: no target has one."""
        targets = self._tenants.get(prefixes.tenant, OrderedDict())
        return next((targets[key] for key in reversed(prefixes.keys) if key in targets), None)

    def note(self, prefixes: "PrefixKeys", url: str) -> None:
        """Record that the target at `url` has these prefixes; evict the least recently used ones beyond the limits."""
        if not prefixes.keys:
            return
        targets = self._tenants.setdefault(prefixes.tenant, OrderedDict())
        self._tenants.move_to_end(prefixes.tenant)
        for key in prefixes.keys:
            targets[key] = url
            targets.move_to_end(key)
        while len(targets) > MOST_PREFIXES:
            targets.popitem(last=False)
        while len(self._tenants) > MOST_TENANTS:
            self._tenants.popitem(last=False)


class PrefixKeys(NamedTuple):
    """Keys of the prefixes of one prompt."""

    tenant: bytes  # key of the tenant
    keys: Sequence[bytes]  # shortest prefix first


def prefix_text(body: bytes) -> str:
    """Return a text that identifies the prompt in a request body: equal prompt prefixes give equal text prefixes."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return ""  # the target reports the error
    if not isinstance(given, Mapping):
        return ""
    content = next((given[key] for key in ("messages", "prompt", "input") if key in given), None)
    if content is None:
        return ""
    before_content = [given.get(key) for key in ("model", "instructions", "system", "tools")]
    parts = content if isinstance(content, list) else [content]
    return "\n".join(_text(part) for part in (before_content, *parts))


def _text(value: Any) -> str:  # noqa: ANN401 - any JSON
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
