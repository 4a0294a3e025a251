"""Reads the keys of a JSON object one by one; unknown keys and wrong types are refused by name."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from foreword.errors import RequestError


def refuse(place: str, what: str) -> RequestError:
    """Return the error for this place."""
    return RequestError(f"speculation policy: {place} {what}")


class Fields:
    """An object of the file, and its keys that were not read yet."""

    def __init__(self, value: object, place: str) -> None:
        if not isinstance(value, Mapping):
            raise refuse(place, "must be an object")
        self._left = dict(value)
        self._known: list[str] = []
        self._place = place

    def place(self, key: str) -> str:
        return f"{self._place}.{key}"

    def has(self, key: str) -> bool:
        return key in self._left

    def take(self, key: str, default: Any) -> Any:  # noqa: ANN401 - any JSON
        """Return the raw value."""
        self._known.append(key)
        value = self._left.pop(key, None)
        return default if value is None else value

    def rest(self) -> dict[str, Any]:
        """Return all keys that were not read."""
        left, self._left = self._left, {}
        return left

    def end(self) -> None:
        """Raise an error for keys that were not read."""
        if self._left:
            key = next(iter(self._left))
            raise refuse(self._place, f"has an unknown key {key!r}; known are {', '.join(self._known)}")

    def number(
        self,
        key: str,
        default: Any,  # noqa: ANN401 - a number or None
        *,
        least: float | None = None,
        most: float | None = None,
        whole: bool = False,
    ) -> Any:  # noqa: ANN401 - a number, or the default
        """Return a number within bounds."""
        value = self.take(key, default)
        if value is default:
            return value
        kind = int if whole else int | float
        if (
            not isinstance(value, kind)
            or isinstance(value, bool)
            or (least is not None and not value >= least)
            or (most is not None and not value <= most)
        ):
            bounds = f" of at least {least:g}" if least is not None else ""
            bounds += f" and at most {most:g}" if most is not None else ""
            what = "a whole number" if whole else "a number"
            raise refuse(self.place(key), f"must be {what}{bounds}, not {value!r}")
        return value

    def text(self, key: str, default: Any) -> Any:  # noqa: ANN401 - a text, or the default
        value = self.take(key, default)
        if value is not default and (not isinstance(value, str) or not value):
            raise refuse(self.place(key), f"must be a text, not {value!r}")
        return value

    def choice(self, key: str, default: Any, allowed: Sequence[str]) -> Any:  # noqa: ANN401 - a text, or the default
        value = self.take(key, default)
        if value is not default and value not in allowed:
            raise refuse(self.place(key), f"must be one of {', '.join(allowed)}, not {value!r}")
        return value

    def texts(self, key: str, default: Sequence[str]) -> list[str]:
        value = self.take(key, list(default))
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise refuse(self.place(key), "must be a list of names")
        return value

    def choices(self, key: str, default: Any, allowed: Iterable[str]) -> list[str]:  # noqa: ANN401 - see `texts`
        """Return a list of distinct, known names."""
        value = self.texts(key, default or ())
        known = list(allowed)
        for entry in value:
            if entry not in known:
                named = ", ".join(known) or "none"
                raise refuse(self.place(key), f"names an unknown {entry!r}; known are {named}")
        if len(set(value)) != len(value):
            raise refuse(self.place(key), "has a name twice")
        return value

    def objects(self, key: str) -> dict[str, object]:
        """Return an object whose keys are names."""
        value = self.take(key, {})
        if not isinstance(value, Mapping):
            raise refuse(self.place(key), "must be an object")
        return dict(value)

    def list(self, key: str) -> "Sequence[object]":
        value = self.take(key, [])
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise refuse(self.place(key), "must be a list")
        return value
