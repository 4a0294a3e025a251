"""Translates, measures and splits regular expressions, JSON schemas and grammars (Lark, GBNF), without compiling them.

"The parser" is that of llguidance, which compiles what this module returns.
"""

import json
import re
import string
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple

from foreword.errors import RequestError
from foreword.structured.params import refusal

_SPACES = r"\t\n\x0B\f\r \u{A0}\u{1680}\u{2000}-\u{200A}\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}\u{FEFF}"
"""ECMA-262 white space and line ends, written for use inside a character class."""

_OUTSIDE_CLASS = {"s": f"[{_SPACES}]", "S": f"[^{_SPACES}]", "0": r"\x00", "<": "<", ">": ">"}
_IN_CLASS = {**_OUTSIDE_CLASS, "s": _SPACES, "b": r"\x08"}
"""Replacements of ECMA-262 escapes (without backslash) that mean something else to the parser, or nothing."""

_VALID_ESCAPES = frozenset(string.punctuation + "sS0123456789bBk")
"""Characters that may follow a backslash, besides those that `_ESCAPE` names.

Of these, the parser refuses back references (1 to 9, k) and, outside a class, word boundaries (b, B).
"""

_ESCAPE = re.compile(
    r"\\(?:(?P<pair>u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(?P<same>[dDwWtnvfr]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|[pP]\{[^{}]*\})"
    r"|(?P<control>c[A-Za-z])|(?P<other>.))",
    re.DOTALL,
)

_ANY = r"\x00-\u{10FFFF}"  # every character, written for use inside a class
_GROUPS = ("(?:", "(?=", "(?!", "(?<")
_CLASS_ESCAPES = tuple(f"\\{name}" for name in "dDwWsSpP")  # each stands for several characters
_SET_OPERATORS = frozenset("[&~^-")
"""Characters that are literal inside an ECMA-262 class, but operators for the parser."""


class EcmaPattern:
    """Translates an ECMA-262 pattern (flag u) of a JSON schema into the parser's syntax."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._position = 0  # of the next character to read

    def translated(self) -> str:
        """Return the translated pattern; raise `RequestError` if it is not valid ECMA-262."""
        written: list[str] = []
        while self._position < len(self._pattern):
            written.append(self._next())
        return "".join(written)

    def _next(self) -> str:
        """Translate the next character, escape or class."""
        character = self._pattern[self._position]
        if character == "\\":
            return self._escape(in_class=False)
        if character == "[":
            return self._class()
        if self._pattern.startswith("(?", self._position) and not self._pattern.startswith(
            _GROUPS, self._position
        ):
            raise self._refused("groups begin with (, (?:, (?=, (?! or (?<name>; flags cannot be set")
        self._position += 1
        return r"[^\n\r\u{2028}\u{2029}]" if character == "." else character

    def _class(self) -> str:
        """Translate a bracketed class."""
        self._position += 1
        is_negated = self._take("^")
        if self._take("]"):
            return f"[{_ANY}]" if is_negated else f"[^{_ANY}]"
        written = ["[^" if is_negated else "["]
        while not self._take("]"):
            is_class = self._pattern.startswith(_CLASS_ESCAPES, self._position)
            atom = self._atom()
            is_last_hyphen = self._pattern.startswith("-]", self._position)
            if not is_class and self._peek() == "-" and not is_last_hyphen:
                self._position += 1
                atom = f"{atom}-{self._atom()}"
            written.append(atom)
        return "".join([*written, "]"])

    def _atom(self) -> str:
        """Translate one character or escape inside a class."""
        character = self._peek()
        if not character:
            raise self._refused("a class is not closed")
        if character == "\\":
            return self._escape(in_class=True)
        self._position += 1
        return f"\\{character}" if character in _SET_OPERATORS else character

    def _escape(self, in_class: bool) -> str:
        """Translate an escape."""
        match = _ESCAPE.match(self._pattern, self._position)
        if match is None:
            raise self._refused("the pattern ends with a backslash")
        self._position = match.end()
        name, kind = match[0][1:], match.lastgroup
        if kind == "pair":  # a surrogate pair, which stands for one character
            code = 0x10000 + (int(name[1:5], 16) - 0xD800) * 0x400 + int(name[7:], 16) - 0xDC00
            return f"\\u{{{code:X}}}"
        if kind == "control":
            return f"\\x{ord(name[1]) % 32:02X}"
        is_octal = name == "0" and self._peek().isdigit()
        if kind == "other" and (name not in _VALID_ESCAPES or is_octal):
            raise self._refused(f"there is no escape \\{name}")
        return (_IN_CLASS if in_class else _OUTSIDE_CLASS).get(name, match[0])

    def _take(self, character: str) -> bool:
        """Skip the next character if it is this one; return whether it is."""
        if self._peek() != character:
            return False
        self._position += 1
        return True

    def _peek(self) -> str:
        """Return the next character; empty at the end."""
        return self._pattern[self._position : self._position + 1]

    def _refused(self, why: str) -> RequestError:
        return refusal(f"pattern {self._pattern[:64]!r} is not valid ECMA-262: {why}")


_UNICODE = "(?u)"

_ASCII_CLASSES = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": r"[ \t\n\r\f\v]",
    "S": r"[^ \t\n\r\f\v]",
}

_ESCAPED = re.compile(r"\\(?:[xuU]\{[^}]*\}|[pP]\{[^}]*\}|.)", re.DOTALL)
_COUNT = re.compile(r"\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}")


def with_ascii_classes(regex: str) -> str:
    r"""Replace \d, \w, \s and their negations by ASCII classes, unless the expression begins with (?u).

    The replacement is a bracketed class, which may be nested inside another class.
    """
    if regex.startswith(_UNICODE):
        return regex
    return _ESCAPED.sub(lambda match: _ASCII_CLASSES.get(match[0][1:], match[0]), regex)


def copies(low: str, high: str | None) -> int:
    """Return the maximum number of copies in a counted repetition such as {2,5}; at least 1, and at most 10**12."""
    digits = (high or low).lstrip("0") or "1"
    return int(digits) if len(digits) < 12 else 10**12


def count_expanded(symbols: Iterable[str | int]) -> int:
    """Return the number of symbols after expanding counted repetitions.

    "(" and ")" begin and end a group, a number repeats the symbol or group before it, and any other text is a symbol.
    """
    sums, last = [0], 0  # size of every open group so far, and size of the last symbol or group
    for symbol in symbols:
        if symbol == "(":
            sums.append(0)
            last = 0
        elif symbol == ")" and len(sums) > 1:
            last = sums.pop()
            sums[-1] += last
        elif isinstance(symbol, int):  # the copies besides the first one
            added = last * (symbol - 1)
            sums[-1] += added
            last += added
        else:
            last = 1
            sums[-1] += 1
    return sum(sums)


def regex_size(regex: str) -> int:
    """Return the number of characters and classes of an expression after expanding counted repetitions."""
    return count_expanded(_symbols(regex))


def _symbols(regex: str) -> Iterator[str | int]:
    """Yield the symbols of a regular expression as `count_expanded` expects them."""
    position = 0
    while position < len(regex):
        character = regex[position]
        if character == "{" and (count := _COUNT.match(regex, position)):
            yield copies(count[1], count[2])
            position = count.end()
        elif character in "()":
            yield character
            position += 1
        elif character in "*+?|":  # no symbols
            position += 1
        else:
            yield character
            position = _atom_end(regex, position)


def _atom_end(regex: str, position: int) -> int:
    """Return the end of the character, escape or (possibly nested) class that starts here."""
    depth = 0
    while position < len(regex):
        match = _ESCAPED.match(regex, position)
        if match is not None:
            position = match.end()
        elif regex[position] == "[":
            depth += 1
            position += 2 if regex.startswith("[^", position) else 1
            if regex.startswith("]", position):  # literal at the start of a class
                position += 1
        else:
            if depth and regex[position] == "]":
                depth -= 1
            position += 1
        if not depth:
            break
    return position


VALUE_KEYWORDS = frozenset({"const", "enum", "default", "examples", "x-guidance"})
"""Keywords whose values are not schemas."""

MAP_KEYWORDS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values map user-defined names to schemas."""


def keywords(schema: object) -> Iterator[tuple[str, Any]]:
    """Yield every (keyword, value) of a schema and its sub-schemas."""
    remaining = [schema]
    while remaining:
        entry = remaining.pop()
        if isinstance(entry, list):
            remaining += entry
        elif isinstance(entry, dict):
            for keyword, value in entry.items():
                yield keyword, value
                if keyword in MAP_KEYWORDS and isinstance(value, dict):
                    remaining += value.values()
                elif keyword not in VALUE_KEYWORDS:
                    remaining.append(value)


SCHEMA = "%json"


class Kind(Enum):
    """Kind of a part of a grammar's text."""

    RULES = "rules"  # names, operators and counts
    LITERAL = "literal"
    REGEX = "regex"  # between slashes, or a bracketed class
    COMMENT = "comment"
    SCHEMA = "schema"  # the JSON after %json
    OTHER = "other"  # the JSON after another directive


class GrammarPart(NamedTuple):
    """A part of a grammar's text."""

    kind: Kind
    text: str
    value: Any = None  # the parsed JSON of SCHEMA and OTHER


_LITERAL = r'"(?:\\.|[^"\\])*"'
_LARK = re.compile(
    rf"(?P<LITERAL>{_LITERAL})|(?P<COMMENT>//[^\n]*|\#[^\n]*)|(?P<REGEX>/(?:\\.|[^/\\\n])+/)"
    r"|(?P<JSON>%(?:json|regex|llguidance)\s*(?=[{\[]))",
    re.DOTALL,
)
_GBNF = re.compile(
    rf"(?P<LITERAL>{_LITERAL})|(?P<COMMENT>\#[^\n]*)|(?P<REGEX>\[(?:\\.|[^\]\\])*\])", re.DOTALL
)


def parts(grammar: str) -> Iterator[GrammarPart]:
    """Yield the parts of a Lark or GBNF grammar in order; their joined texts are the grammar."""
    from llguidance.gbnf_to_lark import is_lark_syntax

    scanner, position = _LARK if is_lark_syntax(grammar) else _GBNF, 0
    while match := scanner.search(grammar, position):
        if match.start() > position:
            yield GrammarPart(Kind.RULES, grammar[position : match.start()])
        position = match.end()
        if match.lastgroup != "JSON":
            yield GrammarPart(Kind[str(match.lastgroup)], match[0])
            continue
        yield GrammarPart(Kind.RULES, match[0])
        try:
            value, end = json.JSONDecoder().raw_decode(grammar, position)
        except (ValueError, RecursionError):  # the parser will report the error
            yield GrammarPart(Kind.RULES, grammar[position:])
            return
        yield GrammarPart(
            Kind.SCHEMA if match[0].startswith(SCHEMA) else Kind.OTHER, grammar[position:end], value
        )
        position = end
    if position < len(grammar):
        yield GrammarPart(Kind.RULES, grammar[position:])
