"""Parameters of structured output."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from foreword.errors import RequestError, refusing

FORMATS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""The keys of which exactly one must be given."""

_FOR_JSON = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
"""The keys that are allowed only with json and json_object."""

MAX_BYTES = 256 * 1024  # maximum size of a schema, grammar, expression or list of choices

MAX_CHOICES = 10_000

MAX_DEPTH = 64  # maximum nesting depth of a schema
FORMAT_PARAM = "structured_outputs"  # name of the request field that errors about a response format report


def refusal(reason: str) -> RequestError:
    """Return the error of a response format that cannot be used."""
    return RequestError(f"structured outputs: {reason}")


@dataclass(frozen=True)
class StructuredOutputs:
    """A response format; names and meanings are vLLM's. Exactly one of the first six is set."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema, as object or text
    regex: str | None = None  # matches the whole answer
    choice: Sequence[str] | None = None  # the allowed answers
    grammar: str | None = None  # EBNF: llama.cpp's GBNF, or Lark
    json_object: bool = False  # any JSON object
    structural_tag: str | Mapping[str, Any] | None = None  # free text with tagged parts that follow schemas
    # Whitespace between JSON tokens; None: exactly one space after commas and colons.
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False  # no whitespace at all
    disable_additional_properties: bool = False  # objects have only the schema's keys

    @refusing(FORMAT_PARAM)
    def __post_init__(self) -> None:
        given = [name for name in FORMATS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            named = ", ".join(given) or "none"
            raise refusal(f"give one of {', '.join(FORMATS)}, not {named}")
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _as_text(name, value))
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check_text(name, getattr(self, name))
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise refusal(f"{name} must be true or false")
        self._check_choice()
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise refusal("whitespace_pattern and disable_any_whitespace exclude each other; give one")
        for name in _FOR_JSON:
            if getattr(self, name) and given[0] not in ("json", "json_object"):
                raise refusal(f"{name} is for json and json_object; leave it out with {given[0]}")
        if sum(len(str(getattr(self, name)).encode("utf-8", "replace")) for name in FORMATS) > MAX_BYTES:
            raise refusal(f"{given[0]} is longer than {MAX_BYTES} bytes; make it smaller")

    @staticmethod
    @refusing(FORMAT_PARAM)
    def of(value: "StructuredOutputs | Mapping[str, Any]") -> "StructuredOutputs":
        """Return the response format of a JSON object; raise `RequestError` for unknown keys and wrong values."""
        if isinstance(value, StructuredOutputs):
            return value
        if not isinstance(value, Mapping):
            raise RequestError('structured outputs must be an object such as {"json": {...}}')
        known = {field.name for field in fields(StructuredOutputs)}
        for key in value:
            if key not in known:
                raise refusal(f"unknown key {str(key)[:64]!r}; there are {', '.join(sorted(known))}")
        return StructuredOutputs(**{key: entry for key, entry in value.items() if entry is not None})

    @property
    def form(self) -> str:
        """Return the key that is given, one of `FORMATS`."""
        return next(name for name in FORMATS if getattr(self, name) not in (None, False))

    def _check_choice(self) -> None:
        if self.choice is None:
            return
        is_list = isinstance(self.choice, Sequence) and not isinstance(self.choice, str)
        listed = tuple(self.choice) if is_list else ()
        if not listed or not all(isinstance(text, str) and text for text in listed):
            raise refusal("choice must be a list of non-empty texts")
        if len(listed) > MAX_CHOICES:
            raise refusal(f"choice has more than {MAX_CHOICES} texts")
        for text in listed:
            _check_text("choice", text)
        object.__setattr__(self, "choice", tuple(dict.fromkeys(listed)))


@dataclass(frozen=True)
class Thinking:
    """A reasoning block at the start of an answer; the response format applies after it."""

    end: str = "</think>"
    begin: str = "<think>"
    budget: int | None = None  # maximum tokens between the tags; None: unlimited
    is_open: bool = False  # the prompt already contains the opening tag

    @refusing("thinking_token_budget")
    def __post_init__(self) -> None:
        for name in ("begin", "end"):
            _check_text(name, getattr(self, name))
        if self.budget is not None and (type(self.budget) is not int or self.budget < 0):
            raise RequestError(f"thinking budget must be a whole number of tokens, not {self.budget!r}")


def _check_text(name: str, value: object) -> None:
    """Raise `RequestError` unless the value is None or a non-empty text in UTF-8."""
    if value is None:
        return
    if not isinstance(value, str) or not value:
        raise refusal(f"{name} must be a non-empty text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise refusal(f"{name} has a lone surrogate, which cannot be encoded in UTF-8") from None


def _as_text(name: str, value: object) -> str:
    """Return a JSON object as text in one layout, so that equal schemas are compiled once."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise refusal(f"{name} is not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(value, Mapping):
        raise refusal(f"{name} must be a JSON object")
    if _is_deeper(value, MAX_DEPTH):
        raise refusal(f"{name} is nested deeper than {MAX_DEPTH} levels")
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise refusal(f"{name} is not JSON: {error}") from None
    _check_text(name, written)
    return written


def _is_deeper(value: object, depth: int) -> bool:
    """Return whether a JSON value is nested deeper than `depth` levels."""
    level: list[object] = [value]
    for _ in range(depth):
        next_level: list[object] = []
        for container in level:
            if isinstance(container, Mapping):
                next_level += container.values()
            elif isinstance(container, list | tuple):
                next_level += container
        level = next_level
    return bool(level)
