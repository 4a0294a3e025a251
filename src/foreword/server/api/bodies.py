"""Request bodies: read within limits, parsed strictly, checked against a pydantic model."""

import asyncio
import json
import re
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from foreword.errors import in_plain_words
from foreword.server.api.types.sampling_types import StrictBody
from foreword.server.api.unknown_fields import UnknownFields
from foreword.server.errors import ApiError
from foreword.server.settings import Limits

Body = TypeVar("Body", bound=StrictBody)

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_LONG_NUMBER = re.compile(r"[0-9]{19}")
_INLINE_BYTES = 64 * 1024  # larger bodies are parsed in a thread, so that others get their turns
_DISCARDED_BODIES = (
    16  # a refused body is read this many times the limit, so that the client sees the refusal
)


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole body, or 413 if it is too long, 408 if it takes too long, 415 if it does not say that it is JSON."""
    kept = bytearray()
    seen = 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                seen += len(part)
                if seen <= limits.body_bytes:
                    kept += part
                elif seen > _DISCARDED_BODIES * limits.body_bytes:
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {limits.body_seconds:.0f} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the client left before its body had arrived") from None
    if seen > limits.body_bytes:
        raise too_long(limits)
    if not _is_json(request.headers.get("content-type", "")):
        raise ApiError(415, "send the body as JSON, with the header Content-Type: application/json")
    return bytes(kept)


def too_long(limits: Limits) -> ApiError:
    """The refusal of a body over the size limit."""
    return ApiError(413, f"the body is longer than {limits.body_bytes} bytes; send less")


def _is_json(content_type: str) -> bool:
    """Of the types that a page may send anywhere without being asked back, none is JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


async def parse_body(data: bytes, model: type[Body], limits: Limits, unknown: UnknownFields) -> Body:
    """The body as `model`; 400 with the field's name for anything that does not fit."""
    if len(data) <= _INLINE_BYTES:
        return parse_json_body(data, model, limits, unknown)
    return await asyncio.to_thread(parse_json_body, data, model, limits, unknown)


def parse_json_body(data: bytes, model: type[Body], limits: Limits, unknown: UnknownFields) -> Body:
    """Parse and check a body; raise 400 with the name of the first field that does not fit."""
    value = load_json(data, limits)
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    try:
        body = model.model_validate(unknown.without(value, model))
    except ValidationError as error:
        raise _first_complaint(error) from None
    unknown.check_parts(body)
    return body


def load_json(data: bytes, limits: Limits) -> object:
    """Strict JSON: UTF-8, no NaN or Infinity, no huge numbers, no deep nesting."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start} is wrong") from None
    try:
        # A call for every integer would be slow for long lists of tokens, and few bodies have long numbers.
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
    """Refuse nesting and objects that no request needs, level by level."""
    level: list[Any] = [value]
    for _ in range(limits.json_depth):
        deeper: list[Any] = []
        for container in level:
            if isinstance(container, dict):
                if len(container) > limits.object_keys:
                    raise ApiError(400, f"an object in the body has more than {limits.object_keys} keys")
                deeper.extend(v for v in container.values() if isinstance(v, dict | list))
            elif isinstance(container, list):
                deeper.extend(v for v in container if isinstance(v, dict | list))
        if not deeper:
            return
        level = deeper
    raise _too_deep(limits)


def _too_deep(limits: Limits) -> ApiError:
    return ApiError(400, f"the body nests deeper than {limits.json_depth} levels")


def _no_constant(name: str) -> NoReturn:
    raise ApiError(400, f"{name} is not JSON; numbers must be finite")


def _int64(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (value := int(digits)) < 2**64:
        raise ApiError(400, "a whole number in the body does not fit into 64 bits")
    return value


def _finite(digits: str) -> float:
    value = float(digits)
    if value - value != 0:
        raise ApiError(400, "a number in the body is too large; numbers must be finite")
    return value


def _first_complaint(error: ValidationError) -> ApiError:
    """One line about the first thing that is wrong; the value itself is not repeated, it may be huge."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(_short(str(part)) for part in first["loc"])
    message = in_plain_words(first["msg"])
    return ApiError(400, f"{place}: {message}" if place else message, param=place or None)


def _short(text: str) -> str:
    return text if len(text) <= 64 else text[:61] + "..."
