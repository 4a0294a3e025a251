"""One call as a JSON object with a name and arguments, read character by character."""

import json
from typing import Any

ARGUMENT_KEYS = ("arguments", "parameters")
"""Keys under which models write a call's arguments, whatever their template says."""


class CallObject:
    """Reads an object whose opening brace has been read."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.has_arguments = False
        self.is_over = False
        self.is_foreign = False  # a key, or a value in its place, that no call has
        self._depth = 1
        self._key: str | None = None  # whose value comes or is being read
        self._string: list[str] | None = None  # being read, with its quotes
        self._escaped = False
        self._reads_value = False

    def read(self, character: str) -> str:
        """Return what the character adds to the arguments, as JSON text."""
        if self._string is not None:
            return self._read_string(character)
        if character == '"':
            self._string = [character]
            return self._of_arguments(character)
        self._check(character)
        if character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.is_over = self._depth == 0
            if self.is_over:
                return ""
        elif self._depth == 1 and character in ":,":
            self._reads_value = character == ":"
            self._key = self._key if self._reads_value else None
            return ""
        is_space = self._depth == 1 and character.isspace()
        return "" if is_space else self._of_arguments(character)

    def _check(self, character: str) -> None:
        """Note what stands in no call: outside strings, only arguments are anything but text."""
        if self._depth == 1 and not character.isspace() and character not in ":,}":
            self.is_foreign |= character != "{" or not (self._reads_value and self._key in ARGUMENT_KEYS)

    @property
    def _is_text_argument(self) -> bool:
        """Whether the string being read is all of the arguments, as some models write them."""
        return self._depth == 1 and self._reads_value and self._key in ARGUMENT_KEYS

    def _of_arguments(self, character: str) -> str:
        is_theirs = self._reads_value and self._key in ARGUMENT_KEYS
        self.has_arguments |= is_theirs
        return character if is_theirs and not (self._string and self._is_text_argument) else ""

    def _read_string(self, character: str) -> str:
        assert self._string is not None
        self._string.append(character)
        more = self._of_arguments(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            more += self._end_string("".join(self._string))
        return more

    def _end_string(self, written: str) -> str:
        """Take in a string; return the arguments that it holds, if it does."""
        self._string = None
        if self._depth != 1:
            return ""
        text = _decoded(written)
        if not self._reads_value:
            self._key = text
            self.is_foreign |= text not in ("name", "type", *ARGUMENT_KEYS)
        elif self._key == "name":
            self.name = text
        elif self._key == "type":
            self.is_foreign |= text != "function"
        elif self._is_text_argument:
            return text if is_object(text) else written
        return ""


def is_object(text: str) -> bool:
    """Whether the text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _decoded(string: str) -> str:
    try:
        value: Any = json.loads(string)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
