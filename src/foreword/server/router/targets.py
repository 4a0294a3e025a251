"""The targets behind a router: how they stand, and which of them gets the next request."""

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from foreword.errors import RequestError

_log = logging.getLogger("foreword.router")

LOAD_BOUND = 1.25
LOAD_SLACK = 2
"""A target that knows a prompt's beginning gets it unless it has so many times the usual load, and so many more."""


@dataclass
class Target:
    """One server, as far as this router knows."""

    url: str
    state: str = "unknown"  # "ready", or what it says of itself, or "down"
    reason: str = ""
    in_flight: int = 0  # requests of this router
    answered: int = 0
    told_load: int = 0  # requests that it had by its own account, when it was last asked
    told_at: int = 0  # `in_flight` at that time

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def load(self) -> int:
        """Requests that it has: what it said, and what has changed here since; others may send it some, too."""
        return max(self.told_load + self.in_flight - self.told_at, self.in_flight, 0)

    def hear(self, load: int | None) -> None:
        """It takes requests, and has so many; None: it does not say."""
        self.state, self.reason = "ready", ""
        self.told_load, self.told_at = (self.in_flight if load is None else load), self.in_flight

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
    """All of them; whoever is added is used once it says that it is ready."""

    def __init__(self, given: str) -> None:
        """Addresses with commas, or @FILE with one in a line, which is read again and again."""
        self._file = Path(given.removeprefix("@")) if given.startswith("@") else None
        self._known: dict[str, Target] = {}
        self._complaint = ""  # of the file, told once
        self.set(_lines(self._file) if self._file is not None else given.split(","))
        if not self._known and self._file is None:
            raise RequestError("--targets must name at least one target: host:port,host:port")

    def __iter__(self) -> Iterator[Target]:
        return iter(list(self._known.values()))

    def set(self, addresses: Collection[str]) -> None:
        """These, and no others: requests that others have under way go on."""
        urls = [target_url(one.strip()) for one in addresses if one.strip()]
        self._known = {url: self._known.get(url) or Target(url) for url in urls}

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

    def choose(self, preferred: str | None, tried: Collection[str] = ()) -> Target | None:
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


def _most(ready: Sequence[Target]) -> float:
    return LOAD_BOUND * sum(target.load for target in ready) / len(ready) + LOAD_SLACK


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the list of targets cannot be read: {error}") from None
