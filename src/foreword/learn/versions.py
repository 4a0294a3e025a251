"""Versions of the head on disk, and which of them is in use: `versions/N/` with learned.json, and state.json."""

import json
import logging
import shutil
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from foreword.errors import RequestError
from foreword.train.files import TRAINING, write_json

_log = logging.getLogger(__name__)

LEARNED = "learned.json"
LOG = "log.jsonl"


@dataclass(frozen=True)
class HeadVersion:
    """A trained head."""

    number: int
    parent: int | None  # version from which its training began; None: the engine's first head, or no head
    created: float  # seconds since 1970
    tenants: tuple[str, ...]  # whose texts it and the versions before it were trained on
    texts: int
    tokens: int  # new answer tokens that it was trained on
    tau_before: float  # tokens per pass on held-out texts
    tau_after: float
    train_seconds: float


@dataclass(frozen=True)
class DropReason:
    """Why a version is no longer used."""

    stage: str  # "off" or "held"
    reason: str


def remove_tree(path: Path) -> None:
    """Delete a directory if possible."""
    shutil.rmtree(path, ignore_errors=True)


class Versions:
    """The versions in a directory. Only the process that has locked the directory may use it."""

    def __init__(
        self,
        directory: Path,
        model: str,
        environment: str,
        remove: Callable[[Path], None] = remove_tree,
    ) -> None:
        """Read the directory; raise `RequestError` if it belongs to another model.

        `environment` describes device and program version. A version in use of another environment is rolled out
        again. So is a candidate, unless the engine ended unexpectedly during its roll-out. `remove` deletes a
        directory.
        """
        self._folder, self._state_path = directory / "versions", directory / "state.json"
        self._model, self._environment, self._remove = model, environment, remove
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for unfinished in self._folder.glob(".*"):
            remove_tree(unfinished)
        self.all = {version.number: version for version in _read_versions(self._folder)}
        self.current: int | None = None  # in use for all requests
        self.candidate: int | None = None  # being rolled out
        self.dropped: dict[int, DropReason] = {}
        self._next = 1 + max(self.all, default=0)
        self._restore()

    def _restore(self) -> None:
        state = _read_state(self._state_path)
        if state.get("model", self._model) != self._model:
            raise RequestError(
                f"{self._state_path.parent} has heads of another model; give another --learn-dir"
            )
        try:
            self._next = max(self._next, int(state.get("next", 1)))
            self.dropped = {
                int(number): DropReason(str(why["stage"]), str(why["reason"]))
                for number, why in state.get("dropped", {}).items()
            }
            self.current, self.candidate = (
                self._known(state.get("current")),
                self._known(state.get("candidate")),
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            _log.warning("%s is damaged, no version is in use: %s", self._state_path, error)
        if self.candidate is not None and not state.get("is_closed"):
            self.drop(self.candidate, "held", "the engine ended unexpectedly during its roll-out")
        if state.get("environment") != self._environment:
            self.current, self.candidate = None, self.current if self.candidate is None else self.candidate
        self.save()

    def _known(self, number: Any) -> int | None:  # noqa: ANN401 - any JSON
        """Return the number of a version that exists and was not dropped, or None."""
        is_known = type(number) is int and number in self.all  # True equals 1
        return number if is_known and number not in self.dropped else None

    def save(self, is_closed: bool = False) -> None:
        """Write state.json. `is_closed`: the engine ends as intended."""
        state = {
            "model": self._model,
            "environment": self._environment,
            "next": self._next,
            "current": self.current,
            "candidate": self.candidate,
            "dropped": {number: asdict(why) for number, why in self.dropped.items()},
            "is_closed": is_closed,
        }
        write_json(self._state_path, state)

    def path(self, number: int) -> Path:
        return self._folder / str(number)

    def begin(self) -> tuple[int, Path]:
        """Return the number of a new version, which no other gets, and the directory for its training."""
        number, self._next = self._next, self._next + 1
        self.save()
        return number, self._folder / f".{number}"

    def publish(self, trained: Path, version: HeadVersion) -> None:
        """Add a trained version as the candidate."""
        write_json(trained / LEARNED, asdict(version))
        trained.replace(self.path(version.number))
        self.all[version.number], self.candidate = version, version.number
        self.save()

    def discard(self, trained: Path) -> None:
        """Delete a trained directory that does not become a version."""
        self._remove(trained)

    def drop(self, number: int, stage: str, reason: str) -> None:
        """Stop using a version, for this reason."""
        self.dropped[number] = DropReason(stage, reason)
        self.current = None if self.current == number else self.current
        self.candidate = None if self.candidate == number else self.candidate
        self.save()

    def promote(self) -> None:
        """Use the candidate for all requests."""
        self.current, self.candidate = self.candidate, None
        self.save()

    def roll_back(self, reason: str) -> None:
        """Stop using the newest version: the one in use with the candidate, or the candidate alone."""
        number, candidate = self.current, self.candidate
        if candidate is not None:
            self.drop(candidate, "held", reason)
        if number is None:
            return
        parent = self._usable_parent(number)
        self.drop(number, "held", reason)
        self.current = parent
        self.save()

    def _usable_parent(self, number: int) -> int | None:
        """Return the newest version before this one that was in use and was not rolled back."""
        parent = self.all[number].parent
        while parent is not None and self._known(parent) is None:
            parent = self.all[parent].parent if parent in self.all else None
        return parent

    def forget(self, tenant: str) -> bool:
        """Delete all versions that a tenant's texts were used for; return whether there were any.

        Directories that are no version are deleted as well: whose texts their heads were trained on is not
        known. If the version in use is one of them, the newest other version that was in use is used again.
        """
        numbers = {number for number, version in self.all.items() if tenant in version.tenants}
        if self.current in numbers:
            self.current = max(
                (number for number in self.all.keys() - numbers if self._was_used_before(number)),
                default=None,
            )
        self.candidate = None if self.candidate in numbers else self.candidate
        self._delete(numbers)
        for path in self._folder.glob("[!.]*"):
            if path.name not in map(str, self.all):
                self._withdraw(path)
        return bool(numbers)

    def _was_used_before(self, number: int) -> bool:
        return number != self.candidate and number not in self.dropped

    def prune(self, count: int) -> None:
        """Delete all versions but the newest ones and those in use."""
        kept = {*sorted(self.all)[-count:], self.current, self.candidate}
        self._delete(self.all.keys() - kept)

    def _delete(self, numbers: Collection[int]) -> None:
        for number in numbers:
            del self.all[number]
            self.dropped.pop(number, None)
            self._withdraw(self.path(number))
        if numbers:
            self.save()

    def _withdraw(self, path: Path) -> None:
        """Delete a version's directory: under another name, since deleting takes long and may be interrupted."""
        withdrawn = path.with_name(f".deleted-{path.name}")
        remove_tree(withdrawn)
        try:
            path.replace(withdrawn)
        except OSError as error:
            _log.error("%s cannot be deleted: %s", path, error)
        self._remove(withdrawn)


def keep_only_log(trained: Path) -> None:
    """Delete the states of a training, which are for a --resume; keep its log."""
    (trained / TRAINING / "log.jsonl").replace(trained / LOG)
    remove_tree(trained / TRAINING)


def _read_versions(folder: Path) -> Iterable[HeadVersion]:
    """Yield the versions of a directory; log those that cannot be read."""
    for path in sorted(folder.iterdir()):
        try:
            version = msgspec.json.decode((path / LEARNED).read_bytes(), type=HeadVersion)
            if str(version.number) != path.name:
                raise ValueError("another number")
            yield version
        except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
            _log.warning("%s is not a version and is not used: %s", path, error)


def _read_state(path: Path) -> dict[str, Any]:
    """Return the saved state; empty without one, or with a log line if it is damaged."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(state, dict):
            return state
        reason = "it is no object"
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
    _log.warning("%s is damaged, no version is in use: %s", path, reason)
    return {}
