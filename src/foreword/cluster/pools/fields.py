"""Values of the cluster file, each checked and refused by its place."""

from collections.abc import Mapping, Sequence
from typing import Any

from foreword.errors import RequestError


def mapping_of(value: object, place: str, known: Sequence[str] | None) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f"cluster file: {place} must be an object")
    for key in value:
        if known is not None and key not in known:
            raise RequestError(
                f"cluster file: {place} has an unknown key {key!r}; known are {', '.join(known)}"
            )
    return value


def list_of(given: Mapping[str, Any], key: str) -> list[object]:
    found = given.get(key) or []
    if not isinstance(found, list):
        raise RequestError(f"cluster file: {key} must be a list")
    return found


def text_of(given: Mapping[str, Any], key: str, place: str) -> str:
    found = given.get(key)
    if not isinstance(found, str) or not found:
        raise RequestError(f"cluster file: {place}.{key} must be a text, not {found!r}")
    return found


def number_of(given: Mapping[str, Any], key: str, place: str) -> int:
    found = given.get(key)
    if not isinstance(found, int) or isinstance(found, bool) or not 0 < found < 1 << 16:
        raise RequestError(
            f"cluster file: {place}.{key} must be a whole number from 1 to 65535, not {found!r}"
        )
    return found


def arguments_of(given: Mapping[str, Any], place: str) -> list[str]:
    found = given.get("args", [])
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise RequestError(f"cluster file: {place}.args must be a list of texts")
    return found


def amount_of(given: Mapping[str, Any], key: str, place: str, default: float) -> float:
    """A number that is not negative."""
    found = given.get(key, default)
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found < float("inf"):
        raise RequestError(f"cluster file: {place}.{key} must be a number from 0 on, not {found!r}")
    return float(found)


def names_of(given: Mapping[str, Any], key: str, place: str) -> tuple[str, ...]:
    found = given.get(key, [])
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise RequestError(f"cluster file: {place}.{key} must be a list of names")
    return tuple(found)
