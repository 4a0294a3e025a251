"""Finds calls without marks: JSON objects with a name and arguments, parsed character by character."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ARGUMENT_KEYS = ("arguments", "parameters")
"""Keys under which models write arguments, whatever their template says."""


class CallObject:
    """Parser of an object whose opening brace was read.

    It may have doubled outer braces: the chat templates of Qwen2.5 show calls so, and models copy them.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.has_arguments = False
        self.is_over = False
        self.is_foreign = False  # has a key or value that no call has
        self._top = 1  # depth of the object's own keys; 2 with doubled braces
        self._depth = 1
        self._is_new = True  # nothing was read yet
        self._key: str | None = None  # key of the current value
        self._string: list[str] | None = None  # current string, with quotes
        self._escaped = False
        self._reads_value = False

    def read(self, character: str) -> str:
        """Return the character's contribution to the arguments, as JSON text."""
        is_new, self._is_new = self._is_new, False
        if is_new and character == "{":
            self._top = self._depth = 2
            return ""
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
            if self._depth < self._top:
                return ""
        elif self._depth == self._top and character in ":,":
            self._reads_value = character == ":"
            self._key = self._key if self._reads_value else None
            return ""
        is_space = self._depth <= self._top and character.isspace()
        return "" if is_space else self._of_arguments(character)

    def _check(self, character: str) -> None:
        """Detect content that no call has: outside strings, only arguments are not text."""
        if self._depth <= self._top and not character.isspace() and character not in ":,}":
            self.is_foreign |= character != "{" or not (self._reads_value and self._key in ARGUMENT_KEYS)

    def single(self, written: str) -> str:
        """Return the object's text without doubled braces."""
        return written[1:-1] if self._top > 1 else written

    @property
    def _is_text_argument(self) -> bool:
        """Whether the current string is the whole arguments, as some models write them."""
        return self._depth == self._top and self._reads_value and self._key in ARGUMENT_KEYS

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
        """Handle a complete string; return the arguments that it contains, if any."""
        self._string = None
        if self._depth != self._top:
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
"""Info strings of code blocks that may contain calls."""
_FENCE = 3
"""Minimum backticks of a code fence."""


@dataclass(frozen=True)
class UntaggedCall:
    """A complete call, with its arguments as written."""

    name: str
    arguments: str


Found = str | UntaggedCall


class UntaggedReader:
    """Incremental parser that returns text and calls in order."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: argument schemas by tool name."""
        self._schemas = schemas
        self._state: Callable[[str], None] = self._line_start
        self._held: list[str] = []  # may still become a call
        self._found: list[Found] = []
        self._is_blank = True  # only space so far: a call may be indented here
        self._indent = 0
        self._fence = 0  # backticks of the open code block; 0: none
        self._line = ""  # current line of a code block
        self._candidate = _Candidate(schemas)

    def feed(self, text: str) -> list[Found]:
        for character in text:
            self._held.append(character)
            self._state(character)
        return self._taken()

    def finish(self) -> list[Found]:
        """End the text: a code block need not be closed; other held-back text is text."""
        if self._fence and self._state == self._in_json and self._candidate.is_complete:
            self._report()
        self._release()
        self._state = self._line_start
        return self._taken()

    def _taken(self) -> list[Found]:
        found, self._found = self._found, []
        return found

    def _release(self) -> None:
        if self._held:
            self._found.append("".join(self._held))
            self._held = []

    def _report(self) -> None:
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
        """Use the info string to decide whether the block may contain calls."""
        name = self._line.strip().lower()
        if character == "`":  # inline code
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
        """Handle text after bare calls: more calls may follow in the same line."""
        if character in "{[":
            self._begin_json(0)
            self._in_json(character)
        elif character == "\n" or not (character.isspace() or character in ",;"):
            self._state = self._in_line
            self._in_line(character)

    def _give_up(self) -> None:
        """Treat it as text: it is no call."""
        line = "".join(self._held).rpartition("\n")[2]
        if self._fence:
            self._begin_code()
            self._line = line
        else:
            self._state = self._in_line
            self._in_line("" if line else "\n")


def _closes(line: str, fence: int) -> bool:
    """Whether a line closes a code block opened with `fence` backticks."""
    line = line.strip()
    return len(line) >= fence and not line.strip("`")


class _Candidate:
    """JSON that may be calls: one object or a list; in a code block, any number of either."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], fence: int = 0) -> None:
        self.calls: list[UntaggedCall] = []
        self.is_over = False
        self.has_failed = False
        self._schemas = schemas
        self._fence = fence
        self._ticks = 0  # closing backticks
        self._in_list = False
        self._object: CallObject | None = None  # currently parsed
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
            self.has_failed = not self._fits(call, arguments)
            self.calls.append(UntaggedCall(call.name or "", arguments))
            self._object = None
            self.is_over = not (self._fence or self._in_list or self.has_failed)

    def _fits(self, call: CallObject, arguments: str) -> bool:
        """Whether the object is JSON with a tool's name and valid arguments."""
        name = call.name
        try:
            written, given = json.loads(call.single("".join(self._written))), json.loads(arguments)
        except (ValueError, RecursionError):
            return False
        has_both = sum(key in written for key in ARGUMENT_KEYS) == 1 and written.get("name") == name
        return has_both and name is not None and fits_schema(self._schemas[name], given)


def fits_schema(schema: Mapping[str, Any], given: object) -> bool:
    """Whether the arguments have all required names and no unknown ones."""
    if not isinstance(given, dict):
        return False
    required, known = schema.get("required"), schema.get("properties")
    if isinstance(required, list) and any(name not in given for name in required):
        return False
    is_open = schema.get("additionalProperties", False) is not False or "patternProperties" in schema
    return is_open or not isinstance(known, Mapping) or all(name in known for name in given)
