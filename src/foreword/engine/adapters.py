"""The LoRA adapters of an engine, by name."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from foreword.backends.interface import Decoder
from foreword.errors import RequestError
from foreword.models.adapters import open_adapter
from foreword.paths import user_path

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
    slot: int  # its number in the decoder, from 1
    rank: int  # of its low-rank matrices
    serial: int  # unique, also among adapters that had the same name
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
        self._leaving: list[LoadedAdapter] = []  # unloaded by name, but still used by requests
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
        lora = open_adapter(user_path(path), self._decoder.config)
        with self._lock:
            if name in self._by_name:
                raise RequestError(f"there is an adapter {name!r} already; unload it first")
            used_slots = {adapter.slot for adapter in (*self._by_name.values(), *self._leaving)}
            slot = next(number for number in itertools.count(1) if number not in used_slots)
            self._decoder.set_adapter(slot, lora)
            loaded = LoadedAdapter(name, Path(path), slot, lora.rank, next(self._serials))
            self._by_name[name] = loaded
        return loaded

    def ensure(self, wanted: LoRARequest | None) -> str:
        """Load the adapter unless it is loaded; return its name, or `NO_ADAPTER` for None."""
        if wanted is None:
            return NO_ADAPTER
        loaded = self._by_name.get(wanted.name)
        if loaded is None:
            self.load(wanted.name, wanted.path)
        elif loaded.path != Path(wanted.path):
            raise RequestError(f"the adapter {wanted.name!r} was loaded from {loaded.path}; unload it first")
        return wanted.name

    def take_over(self, other: "Adapters") -> None:
        """Take over the adapters of a closed engine with the same decoder, which still has their weights."""
        self._by_name, self._leaving, self._serials = other._by_name, other._leaving, other._serials

    def unload(self, name: str) -> None:
        """Refuse new requests with an adapter, and drop its weights when the last of its requests has ended."""
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
        adapter = self._by_name.get(name)
        if adapter is None:
            raise self._unknown(name)
        return adapter

    def hold(self, adapter: LoadedAdapter | None, users: int) -> None:
        """Count `users` requests that use an adapter; each calls `release` at its end."""
        if adapter is None:
            return
        with self._lock:
            if adapter.is_leaving:  # unloaded concurrently
                raise self._unknown(adapter.name)
            adapter.users += users

    def release(self, adapter: LoadedAdapter | None) -> None:
        """Subtract one request, which has ended or was not queued, from an adapter's users."""
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
        names = ", ".join(self._by_name) or "none are loaded"
        return RequestError(f"there is no adapter {name!r}: {names}")
