"""The LoRA adapters of an engine, by name."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from foreword.backends.interface import Decoder
from foreword.errors import RequestError
from foreword.models.adapters import open_adapter

NO_ADAPTER = ""  # name of the base model


@dataclass(frozen=True)
class LoRARequest:
    """The LoRA adapter of a library call, loaded on first use."""

    name: str
    path: str


@dataclass(eq=False)
class LoadedAdapter:
    """One adapter in a slot of the decoder."""

    name: str
    path: Path
    slot: int
    rank: int
    serial: int  # unique, also among adapters of the same name
    users: int = 0  # active requests that use it
    is_leaving: bool = False  # to be unloaded when the last of these requests has ended

    def owner_of_pages(self, tenant: str) -> str:
        """Return the owner under which KV pages are shared: same tenant and same adapter."""
        return f"{tenant}\0{self.serial}"


class Adapters:
    """Loads and unloads adapters, and counts the requests that use each; thread-safe."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._by_name: dict[str, LoadedAdapter] = {}
        self._leaving: list[LoadedAdapter] = []
        self._serials = itertools.count(1)
        self._lock = Lock()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def load(self, name: str, path: str | Path) -> LoadedAdapter:
        """Read an adapter and register its name; on failure, raise an exception and change nothing."""
        if not name or "\0" in name:
            raise RequestError("an adapter needs a name")
        if name in self._by_name:
            raise RequestError(f"there is an adapter {name!r} already; unload it first")
        lora = open_adapter(Path(path).expanduser(), self._decoder.config)
        with self._lock:
            if name in self._by_name:
                raise RequestError(f"there is an adapter {name!r} already; unload it first")
            taken = {one.slot for one in (*self._by_name.values(), *self._leaving)}
            slot = next(number for number in itertools.count(1) if number not in taken)
            self._decoder.set_adapter(slot, lora)
            loaded = LoadedAdapter(name, Path(path), slot, lora.rank, next(self._serials))
            self._by_name[name] = loaded
        return loaded

    def ensure(self, wanted: LoRARequest | None) -> str:
        """Load the adapter unless it is loaded; return its name."""
        if wanted is None:
            return NO_ADAPTER
        known = self._by_name.get(wanted.name)
        if known is None:
            self.load(wanted.name, wanted.path)
        elif known.path != Path(wanted.path):
            raise RequestError(f"the adapter {wanted.name!r} was loaded from {known.path}; unload it first")
        return wanted.name

    def take_over(self, before: "Adapters") -> None:
        """Take over the adapters of a closed engine with the same decoder, which still has them."""
        self._by_name, self._leaving, self._serials = before._by_name, before._leaving, before._serials

    def unload(self, name: str) -> None:
        """Unload an adapter: new requests are refused, running ones finish."""
        with self._lock:
            if name not in self._by_name:
                raise self._unknown(name)
            adapter = self._by_name.pop(name)
            adapter.is_leaving = True
            self._leaving.append(adapter)
            self._drop_if_unused(adapter)

    def find(self, name: str) -> LoadedAdapter | None:
        """Return the adapter, None for the base model; raise `RequestError` for an unknown name."""
        if name == NO_ADAPTER:
            return None
        found = self._by_name.get(name)
        if found is None:
            raise self._unknown(name)
        return found

    def hold(self, adapter: LoadedAdapter | None, users: int) -> None:
        """Count `users` requests that use an adapter; each calls `release` at its end."""
        if adapter is None:
            return
        with self._lock:
            if adapter.is_leaving:  # unloaded concurrently
                raise self._unknown(adapter.name)
            adapter.users += users

    def release(self, adapter: LoadedAdapter | None) -> None:
        """Count one request less, which has ended or was not queued."""
        if adapter is None:
            return
        with self._lock:
            adapter.users -= 1
            self._drop_if_unused(adapter)

    def _drop_if_unused(self, adapter: LoadedAdapter) -> None:
        if adapter.is_leaving and not adapter.users:
            self._decoder.set_adapter(adapter.slot, None)
            self._leaving.remove(adapter)

    def _unknown(self, name: str) -> RequestError:
        known = ", ".join(self._by_name) or "none are loaded"
        return RequestError(f"there is no adapter {name!r}: {known}")
