"""One call as a JSON object with a name and arguments, read character by character."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


_BLOCK_NAMES = ("", "json", "tool_call", "tool_calls")
"""What stands after the backticks of a code block that may hold calls."""
_FENCE = 3
"""The fewest backticks that begin a code block."""


@dataclass(frozen=True)
class UntaggedCall:
    """A whole call, its arguments as they were written."""

    name: str
    arguments: str


Found = str | UntaggedCall


class UntaggedReader:
    """Takes text as it comes, and returns text and calls in their order."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: tools by name, with the schemas of their arguments."""
        self._schemas = schemas
        self._state: Callable[[str], None] = self._line_start
        self._held: list[str] = []  # what may still become a call
        self._found: list[Found] = []
        self._is_blank = True  # nothing but space so far: here a call may be indented
        self._indent = 0
        self._fence = 0  # backticks that opened the code block; 0 outside of one
        self._line = ""  # of a code block: the line so far
        self._candidate = _Candidate(schemas)

    def feed(self, text: str) -> list[Found]:
        for character in text:
            self._held.append(character)
            self._state(character)
        return self._taken()

    def finish(self) -> list[Found]:
        """End the text: a code block need not be closed, everything else that is held back is text."""
        if self._fence and self._state == self._in_json and self._candidate.is_complete:
            self._report()
        self._release()
        self._state = self._line_start
        return self._taken()

    def _taken(self) -> list[Found]:
        found, self._found = self._found, []
        return found

    def _release(self) -> None:
        """What is held back is text."""
        if self._held:
            self._found.append("".join(self._held))
            self._held = []

    def _report(self) -> None:
        """What is held back is calls."""
        self._found += self._candidate.calls
        self._held = []

    def _line_start(self, character: str) -> None:
        if character == "`":
            self._fence, self._state = 1, self._in_backticks
        elif character in "{[" and (self._is_blank or not self._indent):
            self._begin_json(0)
            self._in_json(character)
        else:
            self._release()
            self._is_blank &= character.isspace()
            self._indent = self._indent + 1 if character != "\n" else 0
            self._state = self._line_start if character.isspace() else self._in_line

    def _in_line(self, character: str) -> None:
        self._release()
        self._is_blank = False
        if character == "\n":
            self._begin_line()

    def _begin_line(self) -> None:
        self._fence, self._indent, self._state = 0, 0, self._line_start

    def _in_backticks(self, character: str) -> None:
        if character == "`":
            self._fence += 1
        elif self._fence < _FENCE:
            self._state = self._in_line
            self._in_line(character)
        else:
            self._line, self._state = "", self._in_block_name
            self._in_block_name(character)

    def _in_block_name(self, character: str) -> None:
        """What stands after the backticks decides whether the block may hold calls."""
        name = self._line.strip().lower()
        if character == "`":  # these backticks quote code within a line
            self._state = self._in_line
            self._in_line(character)
        elif character in "\n{[" and name in _BLOCK_NAMES:
            self._begin_json(self._fence)
            self._in_json(character)
        elif character == "\n":
            self._begin_code()
        else:
            self._line += character
            if not any(known.startswith(self._line.strip().lower()) for known in _BLOCK_NAMES):
                self._release()

    def _begin_code(self) -> None:
        """The block holds no call."""
        self._release()
        self._is_blank, self._line, self._state = False, "", self._in_code

    def _in_code(self, character: str) -> None:
        self._release()
        if character != "\n":
            self._line += character
        elif _closes(self._line, self._fence):
            self._begin_line()
        else:
            self._line = ""

    def _begin_json(self, fence: int) -> None:
        self._fence, self._state = fence, self._in_json
        self._candidate = _Candidate(self._schemas, fence)

    def _in_json(self, character: str) -> None:
        candidate = self._candidate
        candidate.read(character)
        if candidate.is_over:
            self._report()
            self._is_blank = False
            self._state = self._in_line if self._fence else self._after_call
            self._fence = 0
        elif candidate.has_failed:
            self._give_up()

    def _after_call(self, character: str) -> None:
        """After bare calls, others may follow in the same line."""
        if character in "{[":
            self._begin_json(0)
            self._in_json(character)
        elif character == "\n" or not (character.isspace() or character in ",;"):
            self._state = self._in_line
            self._in_line(character)

    def _give_up(self) -> None:
        """It is JSON of another shape, or none."""
        line = "".join(self._held).rpartition("\n")[2]
        if self._fence:
            self._begin_code()
            self._line = line
        else:
            self._state = self._in_line
            self._in_line("" if line else "\n")


def _closes(line: str, fence: int) -> bool:
    """Whether a line of a code block that began with so many backticks ends it."""
    line = line.strip()
    return len(line) >= fence and not line.strip("`")


class _Candidate:
    """JSON that may be calls: one object, or a list of them; in a code block, any number of either."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], fence: int = 0) -> None:
        self.calls: list[UntaggedCall] = []
        self.is_over = False
        self.has_failed = False
        self._schemas = schemas
        self._fence = fence
        self._ticks = 0  # of the closing backticks
        self._in_list = False
        self._object: CallObject | None = None  # being read
        self._written: list[str] = []  # its characters
        self._arguments: list[str] = []

    @property
    def is_complete(self) -> bool:
        return bool(self.calls) and self._object is None and not self._in_list

    def read(self, character: str) -> None:
        if self._object is not None:
            self._read_object(self._object, character)
        elif character == "{" and not self._ticks:
            self._object, self._written, self._arguments = CallObject(), ["{"], []
        elif character in "[]" and self._in_list == (character == "]") and not self._ticks:
            self._in_list = character == "["
            self.is_over = not self._fence and self.is_complete
            self.has_failed = not self._fence and not self._in_list and not self.is_over
        elif character == "`" and self._fence and self.is_complete:
            self._ticks += 1
            self.is_over = self._ticks == self._fence
        else:
            self.has_failed = bool(self._ticks) or not (character.isspace() or character in ",;")

    def _read_object(self, call: CallObject, character: str) -> None:
        self._written.append(character)
        self._arguments.append(call.read(character))
        unknown = call.name is not None and call.name not in self._schemas
        self.has_failed = call.is_foreign or unknown
        if call.is_over and not self.has_failed:
            arguments = "".join(self._arguments)
            self.has_failed = not self._fits(call.name, arguments)
            self.calls.append(UntaggedCall(call.name or "", arguments))
            self._object = None
            self.is_over = not (self._fence or self._in_list or self.has_failed)

    def _fits(self, name: str | None, arguments: str) -> bool:
        """Whether the object is JSON with a name and arguments that an offered tool takes."""
        try:
            written, given = json.loads("".join(self._written)), json.loads(arguments)
        except (ValueError, RecursionError):
            return False
        has_both = sum(key in written for key in ARGUMENT_KEYS) == 1 and written.get("name") == name
        return has_both and name is not None and takes(self._schemas[name], given)


def takes(schema: Mapping[str, Any], given: object) -> bool:
    """Whether the schema's object has all names that it requires and none that it does not know."""
    if not isinstance(given, dict):
        return False
    required, known = schema.get("required"), schema.get("properties")
    if isinstance(required, list) and any(name not in given for name in required):
        return False
    is_open = schema.get("additionalProperties", False) is not False or "patternProperties" in schema
    return is_open or not isinstance(known, Mapping) or all(name in known for name in given)
