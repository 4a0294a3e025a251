"""Finds tool calls that a model wrote as JSON without its format's tags, parsing character by character."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foreword.server.api.call_format import Schemas, is_object

ARGUMENT_KEYS = ("arguments", "parameters")
"""Keys under which models write arguments, even if their chat template has the other one."""


class CallObject:
    """Incremental parser of one JSON object that may be a call; its opening brace has been read.

    Its outer braces may be doubled: the chat templates of Qwen2.5 show calls in doubled braces, and models copy them.
    """

    def __init__(self) -> None:
        self.name: str | None = None  # name of the called tool; None: not read yet
        self.has_arguments = False
        self.is_over = False  # whether the closing brace was read
        self.is_foreign = False  # whether the object has a key or value that no call has
        self._top = 1  # depth of the keys "name" and "arguments"; 2 with doubled braces
        self._depth = 1  # number of open braces and brackets
        self._is_first = True  # whether the next character is the first one
        self._key: str | None = None  # the key at depth `_top` that was read last
        self._string: list[str] | None = None  # characters of the current string, with its quotes
        self._is_escaped = False  # whether the next character follows a backslash
        self._reads_value = False  # whether a colon at depth `_top` was read, and no comma after it

    def read(self, character: str) -> str:
        """Read a character; return the JSON text that it adds to the arguments."""
        is_first, self._is_first = self._is_first, False
        if is_first and character == "{":
            self._top = self._depth = 2
            return ""
        if self._string is not None:
            return self._read_string(character)
        if character == '"':
            self._string = [character]
            return self._argument_text(character)
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
            if not self._reads_value:
                self._key = None
            return ""
        is_space = self._depth <= self._top and character.isspace()
        return "" if is_space else self._argument_text(character)

    def _check(self, character: str) -> None:
        """Set `is_foreign` for a value that no call has: outside of the arguments, all values are strings."""
        if self._depth <= self._top and not character.isspace() and character not in ":,}":
            self.is_foreign |= character != "{" or not (self._reads_value and self._key in ARGUMENT_KEYS)

    def without_doubled_braces(self, written: str) -> str:
        """Return the object's text without doubled braces."""
        return written[1:-1] if self._top > 1 else written

    @property
    def _is_text_argument(self) -> bool:
        """Whether the current string contains all arguments as JSON, as some models write them."""
        return self._depth == self._top and self._reads_value and self._key in ARGUMENT_KEYS

    def _argument_text(self, character: str) -> str:
        """Return the character if it is part of the arguments; record that there are arguments."""
        is_argument = self._reads_value and self._key in ARGUMENT_KEYS
        self.has_arguments |= is_argument
        return character if is_argument and not (self._string and self._is_text_argument) else ""

    def _read_string(self, character: str) -> str:
        """Read a character of a string; return the JSON text that it adds to the arguments."""
        assert self._string is not None
        self._string.append(character)
        arguments = self._argument_text(character)
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            arguments += self._end_string("".join(self._string))
        return arguments

    def _end_string(self, written: str) -> str:
        """Handle a complete string; return the arguments that it contains, if any."""
        self._string = None
        if self._depth != self._top:
            return ""
        text = _string_value(written)
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


def _string_value(string: str) -> str:
    """Return the value of a JSON string; empty if it has an invalid escape."""
    try:
        value: Any = json.loads(string)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


_BLOCK_NAMES = ("", "json", "tool_call", "tool_calls")
"""Info strings (the text after the opening fence) of code blocks that may contain calls."""

_FENCE = 3
"""Minimum number of backticks of a code fence."""


@dataclass(frozen=True)
class UntaggedCall:
    """A complete call."""

    name: str
    arguments: str  # a JSON object, as the model wrote it


TextOrCall = str | UntaggedCall


class UntaggedReader:
    """Incremental parser that returns text and calls in order: a state machine.

    A call begins at the start of a line or of a code block. In an indented line, it must be the first of the answer.
    """

    def __init__(self, schemas: Schemas) -> None:
        """`schemas`: argument schemas by tool name."""
        self._schemas = schemas
        self._state: Callable[[str], None] = self._line_start  # reads the next character
        self._held: list[str] = []  # characters that may still become a call
        self._results: list[TextOrCall] = []  # results that were not returned yet
        self._is_blank = True  # whether only space was read so far
        self._indent = 0  # characters of space at the start of the line
        self._fence = 0  # backticks of the open code block; 0: no block is open
        self._line = ""  # current line of a code block
        self._candidate = _Candidate(schemas)

    def feed(self, text: str) -> list[TextOrCall]:
        for character in text:
            self._held.append(character)
            self._state(character)
        return self._take_results()

    def finish(self) -> list[TextOrCall]:
        """End the text: calls in an unclosed code block count; other held-back characters are text."""
        if self._fence and self._state == self._in_json and self._candidate.is_complete:
            self._add_calls()
        self._add_text()
        self._state = self._line_start
        return self._take_results()

    def _take_results(self) -> list[TextOrCall]:
        results, self._results = self._results, []
        return results

    def _add_text(self) -> None:
        if self._held:
            self._results.append("".join(self._held))
            self._held = []

    def _add_calls(self) -> None:
        self._results += self._candidate.calls
        self._held = []

    def _line_start(self, character: str) -> None:
        if character == "`":
            self._fence, self._state = 1, self._in_backticks
        elif character in "{[" and (self._is_blank or not self._indent):
            self._begin_json(0)
            self._in_json(character)
        else:
            self._add_text()
            self._is_blank &= character.isspace()
            self._indent = self._indent + 1 if character != "\n" else 0
            self._state = self._line_start if character.isspace() else self._in_line

    def _in_line(self, character: str) -> None:
        self._add_text()
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
                self._add_text()

    def _begin_code(self) -> None:
        self._add_text()
        self._is_blank, self._line, self._state = False, "", self._in_code

    def _in_code(self, character: str) -> None:
        self._add_text()
        if character != "\n":
            self._line += character
        elif _closes_fence(self._line, self._fence):
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
            self._add_calls()
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
        """Treat the candidate as text, since it is no call."""
        last_line = "".join(self._held).rpartition("\n")[2]
        if self._fence:
            self._begin_code()
            self._line = last_line
        else:
            self._state = self._in_line
            self._in_line("" if last_line else "\n")  # "\n": the candidate ended with its line


def _closes_fence(line: str, fence: int) -> bool:
    """Whether a line closes a code block opened with `fence` backticks."""
    line = line.strip()
    return len(line) >= fence and not line.strip("`")


class _Candidate:
    """Incremental parser of JSON that may be calls: one object or list; in a code block, any number of them."""

    def __init__(self, schemas: Schemas, fence: int = 0) -> None:
        self.calls: list[UntaggedCall] = []
        self.is_over = False  # whether no more calls can follow
        self.has_failed = False  # whether the JSON is not a call
        self._schemas = schemas
        self._fence = fence  # backticks of the code block; 0: outside of code blocks
        self._ticks = 0  # backticks of the closing fence so far
        self._in_list = False
        self._object: CallObject | None = None  # the object that is being parsed
        self._written: list[str] = []  # characters of this object
        self._arguments: list[str] = []  # characters of this object's arguments

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
            self.has_failed = not self._is_valid(call, arguments)
            self.calls.append(UntaggedCall(call.name or "", arguments))
            self._object = None
            self.is_over = not (self._fence or self._in_list or self.has_failed)

    def _is_valid(self, call: CallObject, arguments: str) -> bool:
        """Whether the object is JSON with one key of arguments, which fit the tool's schema."""
        name, text = call.name, call.without_doubled_braces("".join(self._written))
        try:
            written, given = json.loads(text), json.loads(arguments)
        except (ValueError, RecursionError):
            return False
        has_both = sum(key in written for key in ARGUMENT_KEYS) == 1 and written.get("name") == name
        return has_both and name is not None and fits_schema(self._schemas[name], given)


def fits_schema(schema: Mapping[str, Any], given: object) -> bool:
    """Return whether the arguments have all required names, and other names only if the schema allows them."""
    if not isinstance(given, dict):
        return False
    required, known = schema.get("required"), schema.get("properties")
    if isinstance(required, list) and any(name not in given for name in required):
        return False
    is_open = schema.get("additionalProperties", False) is not False or "patternProperties" in schema
    return is_open or not isinstance(known, Mapping) or all(name in known for name in given)
