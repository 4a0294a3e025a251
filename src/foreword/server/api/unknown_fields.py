"""Fields of a request that the server does not know: ignored with a warning, or refused."""

import logging
import re
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from typing import Any

from pydantic import BaseModel

from foreword.server.api.types.foreign_fields import RENAMED
from foreword.server.api.types.sampling_types import StrictBody
from foreword.server.errors import ApiError

log = logging.getLogger("foreword.server")

SHOWN_FIELDS = 8
"""Names in one header, and hints that one request may cost: a body can have a thousand unknown fields."""

LOGGED_FIELDS = 256
"""Names that are logged by one server: clients can make up any number."""

_LIKENESS = 0.75  # of a mistyped name to the right one, as difflib measures it
_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.$-]")  # a header has neither line breaks nor other separators


class UnknownFields:
    """Checks the fields of one body that its model does not declare."""

    def __init__(self, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._ignored: dict[str, tuple[str, type[StrictBody]]] = {}  # by place: name and model

    def without(self, body: dict[str, Any], model: type[StrictBody]) -> dict[str, Any]:
        """Return the fields that `model` declares; raises `ApiError` if another one must not be ignored."""
        for name, value in body.items():
            if name not in model.model_fields:
                self._check(name, name, value, model)
        return {name: value for name, value in body.items() if name in model.model_fields}

    def check_parts(self, body: StrictBody) -> None:
        """Check the unknown fields of all objects inside a body."""
        for path, part in _parts("", body):
            for name, value in (part.model_extra or {}).items():
                self._check(f"{path}{name}", name, value, type(part))

    def ignored(self) -> dict[str, str]:
        """Return the places of ignored fields, without the indices of lists, and what may have been meant."""
        shown = islice(self._ignored.items(), SHOWN_FIELDS)
        return {place: _meant(name, model) or "" for place, (name, model) in shown}

    @property
    def more(self) -> int:
        """Number of ignored fields beyond those that are shown."""
        return max(len(self._ignored) - SHOWN_FIELDS, 0)

    def _check(self, path: str, name: str, value: object, model: type[StrictBody]) -> None:
        foreign = model.foreign.get(name)
        if foreign is not None:
            if foreign.is_neutral(value):
                return
            if foreign.reason or self._is_strict:
                reason = f": {foreign.reason}" if foreign.reason else ""
                raise ApiError(
                    400, f"{path}: is not supported by this server{reason}; leave it out", param=path
                )
        elif self._is_strict or (value is not None and _renamed(name, model) is not None):
            meant = _meant(name, model)
            advice = "leave it out" if meant is None else f"did you mean {meant}?"
            raise ApiError(400, f"unknown field {_short(path)!r}; {advice}", param=_short(path))
        if value is not None:
            above = [part for part in path.removesuffix(name).split(".") if part and not part.isdecimal()]
            self._ignored.setdefault(_short(".".join([*above, name or "?"])), (name, model))


class IgnoredFieldLog:
    """Logs every ignored field once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def header(self, unknown: UnknownFields) -> str:
        """Log the fields that are new, and return all of them as the value of a header; empty if there are none."""
        words = []
        for place, meant in unknown.ignored().items():
            name = _UNPRINTABLE.sub("?", place)
            words.append(f"{name} (did you mean {meant}?)" if meant else name)
            if name not in self._logged and len(self._logged) < LOGGED_FIELDS:
                self._logged.add(name)
                log.warning(
                    "requests have a field that is ignored: %s; --strict-fields refuses it", words[-1]
                )
        return ", ".join([*words, f"{unknown.more} more"] if unknown.more else words)


def _parts(path: str, value: object) -> Iterator[tuple[str, StrictBody]]:
    """The objects inside a body with the beginnings of their fields' names: `messages.0.`."""
    entries: Iterator[tuple[object, object]]
    if isinstance(value, BaseModel):
        if path and isinstance(value, StrictBody):
            yield path, value
        entries = iter((name, getattr(value, name)) for name in type(value).model_fields)
    elif isinstance(value, list):
        entries = iter(enumerate(value))
    else:
        return
    for name, entry in entries:
        if isinstance(entry, BaseModel | list):
            yield from _parts(f"{path}{name}.", entry)


def _renamed(name: str, model: type[StrictBody]) -> str | None:
    """Return this server's name of a field that has another one elsewhere."""
    return next((known for known in RENAMED.get(name, ()) if known in model.model_fields), None)


def _meant(name: str, model: type[StrictBody]) -> str | None:
    """Return the field that was probably meant: by another server's name of it, or by a similar name."""
    similar = get_close_matches(_short(name), model.model_fields, n=1, cutoff=_LIKENESS)
    return _renamed(name, model) or next(iter(similar), None)


def _short(text: str) -> str:
    return text if len(text) <= 64 else text[:61] + "..."
