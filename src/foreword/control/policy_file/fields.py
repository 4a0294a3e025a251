"""Reads and checks the keys of one JSON object in the policy file; errors name the key."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from foreword.errors import RequestError


def policy_error(path: str, problem: str) -> RequestError:
    """Return the error to raise; `path` is that of the key in the file, such as cohorts[0].match."""
    return RequestError(f"speculation policy: {path} {problem}")


class Fields:
    """A JSON object of the file, which records the keys that were read."""

    def __init__(self, value: object, path: str) -> None:
        if not isinstance(value, Mapping):
            raise policy_error(path, "must be an object")
        self._unread = dict(value)
        self._allowed: list[str] = []
        self._path = path

    def path_of(self, key: str) -> str:
        """Return the path of a key in the file, for errors."""
        return f"{self._path}.{key}"

    def has(self, key: str) -> bool:
        return key in self._unread

    def take(self, key: str, default: Any) -> Any:  # noqa: ANN401 - any JSON
        """Return the value of a key, of any type; the default if the key is missing or null."""
        self._allowed.append(key)
        value = self._unread.pop(key, None)
        return default if value is None else value

    def take_rest(self) -> dict[str, Any]:
        """Return all keys that were not read, with their values, and record them as read."""
        unread, self._unread = self._unread, {}
        return unread

    def end(self) -> None:
        """Raise an error if a key was not read: it is unknown."""
        if self._unread:
            key = next(iter(self._unread))
            raise policy_error(
                self._path, f"has an unknown key {key!r}; known are {', '.join(self._allowed)}"
            )

    def number(
        self,
        key: str,
        default: Any,  # noqa: ANN401 - a number or None
        *,
        least: float | None = None,
        most: float | None = None,
        whole: bool = False,
    ) -> Any:  # noqa: ANN401 - a number, or the default
        """Return a number within the bounds `least` and `most`; `whole`: only an integer is valid."""
        value = self.take(key, default)
        if value is default:
            return value
        is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        # Written so that NaN fails every comparison.
        if not (is_number and (least is None or value >= least) and (most is None or value <= most)):
            bounds = f" of at least {least:g}" if least is not None else ""
            bounds += f" and at most {most:g}" if most is not None else ""
            expected = "a whole number" if whole else "a number"
            raise policy_error(self.path_of(key), f"must be {expected}{bounds}, not {value!r}")
        return value

    def text(self, key: str, default: Any) -> Any:  # noqa: ANN401 - a text, or the default
        value = self.take(key, default)
        if value is not default and (not isinstance(value, str) or not value):
            raise policy_error(self.path_of(key), f"must be a text, not {value!r}")
        return value

    def choice(self, key: str, default: Any, allowed: Sequence[str]) -> Any:  # noqa: ANN401 - a text, or the default
        value = self.take(key, default)
        if value is not default and value not in allowed:
            raise policy_error(self.path_of(key), f"must be one of {', '.join(allowed)}, not {value!r}")
        return value

    def texts(self, key: str, default: Sequence[str]) -> list[str]:
        """Return a list of texts."""
        value = self.take(key, list(default))
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise policy_error(self.path_of(key), "must be a list of names")
        return value

    def choices(self, key: str, default: Sequence[str], allowed: Collection[str]) -> list[str]:
        """Return a list of distinct names out of `allowed`."""
        value = self.texts(key, default)
        for entry in value:
            if entry not in allowed:
                listed = ", ".join(allowed) or "none"
                raise policy_error(self.path_of(key), f"names an unknown {entry!r}; known are {listed}")
        if len(set(value)) != len(value):
            raise policy_error(self.path_of(key), "has a name twice: name each once")
        return value

    def objects(self, key: str) -> dict[str, object]:
        """Return an object whose keys are names; empty if it is missing."""
        value = self.take(key, {})
        if not isinstance(value, Mapping):
            raise policy_error(self.path_of(key), "must be an object")
        return dict(value)

    def list(self, key: str) -> "Sequence[object]":
        """Return a list with entries of any type; empty if it is missing."""
        value = self.take(key, [])
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise policy_error(self.path_of(key), "must be a list")
        return value
