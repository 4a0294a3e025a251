"""A file of finished measurements, so that a long run can be interrupted and taken up again."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from foreword.errors import RequestError


class Kept(Protocol):
    """A measurement that can be written down."""

    def as_json(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=Kept)

_BEFORE = {"ignore_eos": True}
"""What files were measured with that do not say it."""


class Ledger(Generic[R]):
    """One JSON line for the settings, then one for every measurement."""

    def __init__(
        self, path: Path, settings: Mapping[str, Any], parse: Callable[[Mapping[str, Any]], R]
    ) -> None:
        """Open a file of the same settings, or begin one; a file of other settings is refused.

        `parse` reads a measurement back, or raises `ValueError`.
        """
        self._path = path
        self.records: list[R] = []
        lines = self._complete_lines()
        if not lines:
            self._append({"settings": settings})
            return
        self._check_settings(lines[0], settings)
        for number, line in enumerate(lines[1:], start=2):
            try:
                self.records.append(parse(json.loads(line)))
            except ValueError as error:
                raise RequestError(f"{path}, line {number} is no measurement: {error}") from None

    def add(self, record: R) -> None:
        """Keep a finished measurement; it is on disk when this returns."""
        self._append(record.as_json())
        self.records.append(record)

    def _complete_lines(self) -> list[str]:
        """The file's lines; one that an interruption cut short is taken off the file."""
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
