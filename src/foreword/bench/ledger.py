"""Result files of long benchmarks: one JSON line per measurement, so that an interrupted run can be continued."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, get_type_hints

from foreword.errors import RequestError

R = TypeVar("R")  # a measurement: a dataclass
_BEFORE = {"ignore_eos": True}  # settings of files that do not state them


class Ledger(Generic[R]):
    """A file with one JSON line for the settings and one per measurement."""

    def __init__(self, path: Path, settings: Mapping[str, Any], kind: type[R]) -> None:
        """Open a file of measurements of this kind with the same settings, or create one; refuse other settings."""
        self._path = path
        self.records: list[R] = []
        lines = self._complete_lines()
        if not lines:
            self._append({"settings": settings})
            return
        self._check_settings(lines[0], settings)
        for number, line in enumerate(lines[1:], start=2):
            try:
                self.records.append(restored(kind, json.loads(line)))
            except ValueError as error:
                raise RequestError(f"{path}, line {number} is no measurement: {error}") from None

    def add(self, record: R) -> None:
        """Append a measurement durably."""
        self._append(asdict(record))  # type: ignore[call-overload]
        self.records.append(record)

    def _complete_lines(self) -> list[str]:
        """Return the file's lines; remove an incomplete last one."""
        try:
            content = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
            complete = content[: content.rfind("\n") + 1]
            if complete != content:
                self._path.write_text(complete, encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"--resume {self._path} cannot be used: {error}") from None
        return complete.splitlines()

    def _check_settings(self, line: str, settings: Mapping[str, Any]) -> None:
        try:
            found = json.loads(line)["settings"]
            found.keys()
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RequestError(f"--resume {self._path} is not a file of this benchmark") from None
        found = {key: value for key, value in _BEFORE.items() if key in settings} | found
        for key in sorted(settings.keys() | found.keys()):
            if settings.get(key) != found.get(key):
                raise RequestError(
                    f"--resume {self._path} was measured with {key} {found.get(key)!r}, "
                    f"not {settings.get(key)!r}; use the same settings or another file"
                )

    def _append(self, value: Mapping[str, Any]) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(value) + "\n")
        except OSError as error:
            raise RequestError(f"--resume {self._path} cannot be written: {error}") from None


def restored(kind: type[R], value: Mapping[str, Any]) -> R:
    """Restore a dataclass from JSON, also nested ones; missing fields get their defaults; raise ValueError."""
    hints, found = get_type_hints(kind), dict[str, Any]()
    try:
        for field in fields(kind):  # type: ignore[arg-type]
            name, hint = field.name, hints[field.name]
            item = value[name] if field.default is MISSING else value.get(name, field.default)
            if is_dataclass(hint):
                item = restored(cast(type[Any], hint), item)
            found[name] = tuple(item) if isinstance(item, list) else item
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a measurement: {error}") from None
    return kind(**found)
