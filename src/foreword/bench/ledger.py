"""Result files of long benchmarks, with one JSON line per measurement: the next call continues an interrupted one."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, get_type_hints

from foreword.errors import RequestError

R = TypeVar("R")  # a measurement: a dataclass
_OLD_DEFAULTS = {"ignore_eos": True}  # settings of old files, which do not state them
_BEGINNING = '{"settings": '  # of the first line


class Ledger(Generic[R]):
    """A file with one JSON line for the settings and one per measurement."""

    def __init__(self, path: Path, settings: Mapping[str, Any], kind: type[R]) -> None:
        """Read the file's measurements, or create the file; raise `RequestError` if it has other settings."""
        self._path = path
        self.records: list[R] = []
        content = self._content()
        *lines, incomplete = content.split("\n")
        if lines:
            self._check_settings(lines[0], settings)
        elif not _BEGINNING.startswith(incomplete[: len(_BEGINNING)]):
            raise RequestError(f"--resume {path} is not a file of this benchmark")
        if incomplete:
            self._write("w", content.removesuffix(incomplete))
        if not lines:
            self._append({"settings": settings})
        for number, line in enumerate(lines[1:], start=2):
            try:
                self.records.append(restored(kind, json.loads(line)))
            except ValueError as error:
                raise RequestError(f"{path}, line {number} is no measurement: {error}") from None

    def add(self, record: R) -> None:
        """Append a measurement durably."""
        self._append(asdict(record))  # type: ignore[call-overload]
        self.records.append(record)

    def _content(self) -> str:
        try:
            return self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"--resume {self._path} cannot be used: {error}") from None

    def _check_settings(self, line: str, settings: Mapping[str, Any]) -> None:
        try:
            of_file = json.loads(line)["settings"]
            of_file.keys()  # raises AttributeError if it is no JSON object
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RequestError(f"--resume {self._path} is not a file of this benchmark") from None
        of_file = {key: value for key, value in _OLD_DEFAULTS.items() if key in settings} | of_file
        for key in sorted(settings.keys() | of_file.keys()):
            if settings.get(key) != of_file.get(key):
                raise RequestError(
                    f"--resume {self._path} was measured with {key} {of_file.get(key)!r}, "
                    f"not {settings.get(key)!r}; use the same settings or another file"
                )

    def _append(self, value: Mapping[str, Any]) -> None:
        self._write("a", json.dumps(value) + "\n")

    def _write(self, mode: str, text: str) -> None:
        try:
            with self._path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise RequestError(f"--resume {self._path} cannot be written: {error}") from None


def restored(kind: type[R], value: Mapping[str, Any]) -> R:
    """Return the dataclass with this JSON value, also a nested one; missing fields get their defaults.

    Raise `ValueError` if a field without a default is missing.
    """
    hints, values = get_type_hints(kind), dict[str, Any]()
    try:
        for field in fields(kind):  # type: ignore[arg-type]
            name, hint = field.name, hints[field.name]
            item = value[name] if field.default is MISSING else value.get(name, field.default)
            if is_dataclass(hint):
                item = restored(cast(type[Any], hint), item)
            values[name] = tuple(item) if isinstance(item, list) else item
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a measurement: {error}") from None
    return kind(**values)
