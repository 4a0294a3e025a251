"""Request bodies: read within limits and parsed strictly; unknown fields are ignored or refused."""

import asyncio
import json
import logging
import math
import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from itertools import islice
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from foreword.errors import in_plain_words
from foreword.server.api.foreign_fields import RENAMED
from foreword.server.api.sampling_types import StrictBody
from foreword.server.errors import ApiError
from foreword.server.settings import Limits

log = logging.getLogger("foreword.server")

SHOWN_FIELDS = 8
"""Maximum number of ignored fields that a response header lists."""

LOGGED_FIELDS = 256
"""Maximum number of ignored fields that one server logs."""

_LIKENESS = 0.75  # minimum difflib similarity of a suggested name
_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.$-]")  # characters that must not appear in a header


class UnknownFields:
    """Checks the fields of one body that its model does not declare, and collects the ignored ones."""

    def __init__(self, is_strict: bool) -> None:
        """`is_strict`: refuse all of these fields."""
        self._is_strict = is_strict
        # path -> (name, model in which it is unknown)
        self._ignored: dict[str, tuple[str, type[StrictBody]]] = {}

    def take_declared(self, body: dict[str, Any], model: type[StrictBody]) -> dict[str, Any]:
        """Return the fields that `model` declares, and record the other fields as ignored.

        Raise `ApiError` for a field that must not be ignored.
        """
        for name, value in body.items():
            if name not in model.model_fields:
                self._check(name, name, value, model)
        return {name: value for name, value in body.items() if name in model.model_fields}

    def check_parts(self, body: StrictBody) -> None:
        """Record the unknown fields of the objects inside a validated body as ignored, or raise `ApiError`."""
        for path, part in _parts("", body):
            for name, value in (part.model_extra or {}).items():
                self._check(f"{path}{name}", name, value, type(part))

    def listed_fields(self) -> dict[str, str]:
        """Return the first ignored fields: path without list indices -> name that was probably meant, or ""."""
        listed = islice(self._ignored.items(), SHOWN_FIELDS)
        return {path: _suggestion(name, model) or "" for path, (name, model) in listed}

    @property
    def unlisted_count(self) -> int:
        """Number of ignored fields that `listed_fields` omits."""
        return max(len(self._ignored) - SHOWN_FIELDS, 0)

    def _check(self, path: str, name: str, value: object, model: type[StrictBody]) -> None:
        """Record an unknown field as ignored, or raise `ApiError` if it must not be."""
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
            suggestion = _suggestion(name, model)
            advice = "leave it out" if suggestion is None else f"did you mean {suggestion}?"
            raise ApiError(400, f"unknown field {_short(path)!r}; {advice}", param=_short(path))
        if value is not None:
            parents = [part for part in path.removesuffix(name).split(".") if part and not part.isdecimal()]
            self._ignored.setdefault(_short(".".join([*parents, name or "?"])), (name, model))


class IgnoredFieldLog:
    """Logs each ignored field once per server."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def header(self, unknown: UnknownFields) -> str:
        """Log the ignored fields of a body that were not logged before; return all as a header value."""
        entries = []
        for path, suggestion in unknown.listed_fields().items():
            name = _UNPRINTABLE.sub("?", path)
            entries.append(f"{name} (did you mean {suggestion}?)" if suggestion else name)
            if name not in self._logged and len(self._logged) < LOGGED_FIELDS:
                self._logged.add(name)
                log.warning("requests have an ignored field: %s; --strict-fields refuses it", entries[-1])
        if unknown.unlisted_count:
            entries.append(f"{unknown.unlisted_count} more")
        return ", ".join(entries)


def _parts(path: str, value: object) -> Iterator[tuple[str, StrictBody]]:
    """Yield the objects inside a body, each with the prefix of its fields' paths, such as `messages.0.`."""
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
    """Return this server's name of a field that other servers name differently."""
    return next((known for known in RENAMED.get(name, ()) if known in model.model_fields), None)


def _suggestion(name: str, model: type[StrictBody]) -> str | None:
    """Return the name of the field that was probably meant: one named differently here, or spelled similarly."""
    similar = get_close_matches(_short(name), model.model_fields, n=1, cutoff=_LIKENESS)
    return _renamed(name, model) or next(iter(similar), None)


def _short(text: str) -> str:
    return text if len(text) <= 64 else text[:61] + "..."


Body = TypeVar("Body", bound=StrictBody)
Result = TypeVar("Result")

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_LONG_NUMBER = re.compile(r"[0-9]{19}")
_INLINE_BYTES = 64 * 1024  # larger bodies are parsed in a thread
# A body over the limit is read up to this multiple of the limit, since clients read the error only after sending.
_DISCARDED_BODIES = 16


async def read_body(request: Request, limits: Limits) -> bytes:
    """Read the body; raise 413 if it is too long, 408 if it is too slow, 415 if it is not declared as JSON."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > _DISCARDED_BODIES * limits.body_bytes:
        raise too_long(limits)
    body = bytearray()
    received = 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                received += len(part)
                if received <= limits.body_bytes:
                    body += part
                elif received > _DISCARDED_BODIES * limits.body_bytes:
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {limits.body_seconds:.0f} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the client disconnected before it had sent the whole body") from None
    if received > limits.body_bytes:
        raise too_long(limits)
    if not _is_json(request.headers.get("content-type", "")):
        raise ApiError(415, "send the body as JSON, with the header Content-Type: application/json")
    return bytes(body)


def too_long(limits: Limits) -> ApiError:
    return ApiError(413, f"the body is longer than {limits.body_bytes} bytes; send less")


def _is_json(content_type: str) -> bool:
    """Whether a content type is JSON, which a web page cannot send to another origin without a preflight."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


async def parse_body(data: bytes, limits: Limits, read: Callable[[dict[str, Any]], Result]) -> Result:
    """Parse the body's object and pass it to `read`; long bodies in a thread."""
    if len(data) <= _INLINE_BYTES:
        return read(load_object(data, limits))
    return await asyncio.to_thread(lambda: read(load_object(data, limits)))


def load_object(data: bytes, limits: Limits) -> dict[str, Any]:
    """Return the body's JSON object; raise 400 for anything else."""
    value = load_json(data, limits)
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    return value


def object_at(path: str, value: object) -> dict[str, Any]:
    """Return the value at this path of a body; raise 400 if it is not an object."""
    if not isinstance(value, dict):
        raise ApiError(400, f"{path}: must be an object", param=path)
    return value


def text_in(path: str, value: dict[str, Any], name: str, *, may_be_empty: bool = True) -> str:
    """Return the field `name` of the object at this path of a body; raise 400 if it is not a text."""
    text, path = value.get(name), f"{path}.{name}"
    if not isinstance(text, str):
        raise ApiError(400, f"{path}: must be a text", param=path)
    if not (text or may_be_empty):
        raise ApiError(400, f"{path}: must not be empty", param=path)
    return text


def checked_body(value: dict[str, Any], model: type[Body], unknown: UnknownFields) -> Body:
    """Validate the object as `model`; raise 400 for the first invalid field."""
    try:
        body = model.model_validate(unknown.take_declared(value, model))
    except ValidationError as error:
        raise _first_error(error) from None
    unknown.check_parts(body)
    return body


def load_json(data: bytes, limits: Limits) -> object:
    """Parse strict JSON: UTF-8, no NaN or Infinity, no huge numbers, no deep nesting."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start} is wrong") from None
    try:
        # Checking every integer would be slow for long token lists, and few bodies have long numbers.
        check_int = _int64 if _LONG_NUMBER.search(text) else None
        value = json.loads(text, parse_constant=_no_constant, parse_int=check_int, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _too_deep(limits) from None
    _check_shape(value, limits)
    if _SURROGATE.search(text):
        _refuse_lone_surrogates(value)
    return value


def _refuse_lone_surrogates(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ApiError(400, "a text in the body has half a surrogate pair, which is no text") from None


def _check_shape(value: object, limits: Limits) -> None:
    """Raise 400 for too deep nesting or an object with too many keys, level by level."""
    level: list[Any] = [value]
    for _ in range(limits.json_depth):
        deeper: list[Any] = []
        for container in level:
            if isinstance(container, dict):
                if len(container) > limits.object_keys:
                    raise ApiError(400, f"an object in the body has more than {limits.object_keys} keys")
                deeper.extend(entry for entry in container.values() if isinstance(entry, dict | list))
            elif isinstance(container, list):
                deeper.extend(entry for entry in container if isinstance(entry, dict | list))
        if not deeper:
            return
        level = deeper
    raise _too_deep(limits)


def _too_deep(limits: Limits) -> ApiError:
    return ApiError(400, f"the body nests deeper than {limits.json_depth} levels")


def _no_constant(name: str) -> NoReturn:
    raise ApiError(400, f"{name} is not JSON; numbers must be finite")


def _int64(digits: str) -> int:
    # The length is checked first: converting a huge number would be slow.
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        raise ApiError(400, "a whole number in the body does not fit into 64 bits")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ApiError(400, "a number in the body is too large; numbers must be finite")
    return value


def _first_error(error: ValidationError) -> ApiError:
    """Return the first validation error in one line, without the value, which may be huge."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ".".join(_short(str(part)) for part in first["loc"])
    message = in_plain_words(first["msg"])
    return ApiError(400, f"{path}: {message}" if path else message, param=path or None)
