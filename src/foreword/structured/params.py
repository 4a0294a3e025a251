"""What a user may ask of an answer's form."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from foreword.errors import RequestError, refusing

FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Of these a request gives one."""

_JSON_ONLY = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")

MAX_BYTES = 256 * 1024
"""Longest schema, grammar, expression or list of choices."""

MAX_CHOICES = 10_000

MAX_DEPTH = 64
"""Objects and lists of a schema inside each other."""


FORM_PARAM = "structured_outputs"
"""The field that errors about a response format name; a server has more fields that mean the same."""


@dataclass(frozen=True)
class StructuredOutputs:
    """The form of an answer; names and meanings are vLLM's. Exactly one of the first six is given."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema, as an object or as text
    regex: str | None = None  # the whole answer matches it
    choice: Sequence[str] | None = None  # the answer is one of these
    grammar: str | None = None  # EBNF: llama.cpp's GBNF, or Lark
    json_object: bool = False  # any JSON object
    structural_tag: str | Mapping[str, Any] | None = None  # free text in which tagged parts follow schemas
    # Between the tokens of JSON; None: one space after every comma and colon and nothing else.
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False  # not even these spaces
    disable_additional_properties: bool = False  # objects have no keys but those that the schema names

    @refusing(FORM_PARAM)
    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            named = ", ".join(given) or "none"
            raise RequestError(f"structured outputs: give one of {', '.join(FORMS)}, not {named}")
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _as_text(name, value))
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check_text(name, getattr(self, name))
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"structured outputs: {name} must be true or false")
        self._check_choice()
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise RequestError(
                "structured outputs: whitespace_pattern and disable_any_whitespace exclude each other"
            )
        for name in _JSON_ONLY:
            if getattr(self, name) and given[0] not in ("json", "json_object"):
                raise RequestError(
                    f"structured outputs: {name} is for json and json_object; leave it out beside {given[0]}"
                )
        if sum(len(str(getattr(self, name)).encode("utf-8", "replace")) for name in FORMS) > MAX_BYTES:
            raise RequestError(f"structured outputs: {given[0]} is longer than {MAX_BYTES} bytes")

    @staticmethod
    @refusing(FORM_PARAM)
    def of(value: "StructuredOutputs | Mapping[str, Any]") -> "StructuredOutputs":
        """An object of JSON as it stands; every key is checked by name."""
        if isinstance(value, StructuredOutputs):
            return value
        if not isinstance(value, Mapping):
            raise RequestError('structured outputs must be an object such as {"json": {...}}')
        known = {field.name for field in fields(StructuredOutputs)}
        for key in value:
            if key not in known:
                raise RequestError(
                    f"structured outputs: unknown key {str(key)[:64]!r}; there are {', '.join(sorted(known))}"
                )
        return StructuredOutputs(**{key: entry for key, entry in value.items() if entry is not None})

    @property
    def form(self) -> str:
        """Which of the forms it is."""
        return next(name for name in FORMS if getattr(self, name) not in (None, False))

    def _check_choice(self) -> None:
        if self.choice is None:
            return
        is_list = isinstance(self.choice, Sequence) and not isinstance(self.choice, str)
        listed = tuple(self.choice) if is_list else ()
        if not listed or not all(isinstance(text, str) and text for text in listed):
            raise RequestError("structured outputs: choice must be a list of non-empty texts")
        if len(listed) > MAX_CHOICES:
            raise RequestError(f"structured outputs: choice has more than {MAX_CHOICES} texts")
        for text in listed:
            _check_text("choice", text)
        object.__setattr__(self, "choice", tuple(dict.fromkeys(listed)))


@dataclass(frozen=True)
class Thinking:
    """Reasoning between tags, with which an answer begins; a form applies to the text after it."""

    end: str = "</think>"
    begin: str = "<think>"
    budget: int | None = None  # most tokens between the tags; None: any number
    is_open: bool = False  # the prompt has begun it

    @refusing("thinking_token_budget")
    def __post_init__(self) -> None:
        for name in ("begin", "end"):
            _check_text(name, getattr(self, name))
        if self.budget is not None and (type(self.budget) is not int or self.budget < 0):
            raise RequestError(f"thinking budget must be a whole number of tokens, not {self.budget!r}")


def _check_text(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not value:
        raise RequestError(f"structured outputs: {name} must be a non-empty text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(
            f"structured outputs: {name} has half a surrogate pair, which is no text"
        ) from None


def _as_text(name: str, value: object) -> str:
    """JSON in its one written form, so that equal schemas are compiled once."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"structured outputs: {name} is not JSON: {str(error).splitlines()[0]}"
            ) from None
    if not isinstance(value, Mapping):
        raise RequestError(f"structured outputs: {name} must be a JSON object")
    if _is_deeper(value, MAX_DEPTH):
        raise RequestError(f"structured outputs: {name} nests deeper than {MAX_DEPTH} levels")
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RequestError(f"structured outputs: {name} is not JSON: {error}") from None
    _check_text(name, written)
    return written


def _is_deeper(value: object, depth: int) -> bool:
    level: list[object] = [value]
    for _ in range(depth):
        level = [
            entry
            for container in level
            if isinstance(container, Mapping | list | tuple)
            for entry in (container.values() if isinstance(container, Mapping) else container)
        ]
        if not level:
            return False
    return True
