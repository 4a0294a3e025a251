"""Parses regular expressions, JSON schemas, and Lark or GBNF grammars as text."""

import json
import re
import string
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple

from foreword.errors import RequestError

_SPACES = r"\t\n\x0B\f\r \u{A0}\u{1680}\u{2000}-\u{200A}\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}\u{FEFF}"
"""ECMA-262 white space and line ends, for use inside a class."""

_OUTSIDE = {"s": f"[{_SPACES}]", "S": f"[^{_SPACES}]", "0": r"\x00", "<": "<", ">": ">"}
_IN_CLASS = {**_OUTSIDE, "s": _SPACES, "b": r"\x08"}
"""Replacements of escapes; other escapes have the same meaning in both dialects."""

_KNOWN = frozenset(string.punctuation + "sS0123456789bBk")
"""Single-character escapes. The parser refuses back references and word boundaries."""

_ESCAPE = re.compile(
    r"\\(?:(?P<pair>u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(?P<same>[dDwWtnvfr]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|[pP]\{[^{}]*\})"
    r"|(?P<control>c[A-Za-z])|(?P<other>.))",
    re.DOTALL,
)

_ANY = r"\x00-\u{10FFFF}"
_GROUPS = ("(?:", "(?=", "(?!", "(?<")
_MANY = tuple(f"\\{name}" for name in "dDwWsSpP")
_SET_SIGNS = frozenset("[&~^-")
"""Characters that are literal inside an ECMA-262 class, but not for the parser."""


class EcmaPattern:
    """Translates an ECMA-262 pattern (flag u) of a JSON schema into the parser's syntax."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._place = 0

    def translated(self) -> str:
        """Return the translated pattern; raise `RequestError` if it is not valid ECMA-262."""
        written: list[str] = []
        while self._place < len(self._pattern):
            written.append(self._next())
        return "".join(written)

    def _next(self) -> str:
        character = self._pattern[self._place]
        if character == "\\":
            return self._escape(in_class=False)
        if character == "[":
            return self._class()
        if self._pattern.startswith("(?", self._place) and not self._pattern.startswith(_GROUPS, self._place):
            raise self._refused("groups begin with (, (?: or (?<name>, and flags cannot be set inside")
        self._place += 1
        return r"[^\n\r\u{2028}\u{2029}]" if character == "." else character

    def _class(self) -> str:
        self._place += 1
        is_negated = self._take("^")
        if self._take("]"):
            return f"[{_ANY}]" if is_negated else f"[^{_ANY}]"
        written = ["[^" if is_negated else "["]
        while not self._take("]"):
            is_many = self._pattern.startswith(_MANY, self._place)
            first = self._atom()
            if (
                not is_many
                and self._peek() == "-"
                and self._pattern[self._place + 1 : self._place + 2] != "]"
            ):
                self._place += 1
                first = f"{first}-{self._atom()}"
            written.append(first)
        return "".join([*written, "]"])

    def _atom(self) -> str:
        """Read one character or escape of a class."""
        character = self._peek()
        if not character:
            raise self._refused("a class is not closed")
        if character == "\\":
            return self._escape(in_class=True)
        self._place += 1
        return f"\\{character}" if character in _SET_SIGNS else character

    def _escape(self, in_class: bool) -> str:
        found = _ESCAPE.match(self._pattern, self._place)
        if found is None:
            raise self._refused("it ends with a backslash")
        self._place = found.end()
        name, kind = found[0][1:], found.lastgroup
        if kind == "pair":
            code = 0x10000 + (int(name[1:5], 16) - 0xD800) * 0x400 + int(name[7:], 16) - 0xDC00
            return f"\\u{{{code:X}}}"
        if kind == "control":
            return f"\\x{ord(name[1]) % 32:02X}"
        is_octal = name == "0" and self._peek().isdigit()
        if kind == "other" and (name not in _KNOWN or is_octal):
            raise self._refused(f"it has no escape \\{name}")
        return (_IN_CLASS if in_class else _OUTSIDE).get(name, found[0])

    def _take(self, character: str) -> bool:
        is_next = self._peek() == character
        self._place += is_next
        return is_next

    def _peek(self) -> str:
        return self._pattern[self._place : self._place + 1]

    def _refused(self, why: str) -> RequestError:
        return RequestError(
            f"structured outputs: pattern {self._pattern[:64]!r} is not one of ECMA-262: {why}"
        )


_UNICODE = "(?u)"

_ASCII = {
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
    r"""Replace \d, \w and \s by ASCII classes; an expression that begins with (?u) is unchanged.

    The replacement is a bracketed class, which may be nested inside another class.
    """
    if regex.startswith(_UNICODE):
        return regex
    return _ESCAPED.sub(lambda found: _ASCII.get(found[0][1:], found[0]), regex)


def copies(low: str, high: str | None) -> int:
    """Return the number of copies in a counted repetition such as {2,5}; at least one."""
    digits = (high or low).lstrip("0") or "1"
    return int(digits) if len(digits) < 12 else 10**12


def expanded(symbols: Iterable[str | int]) -> int:
    """Return the number of symbols after expanding counted repetitions.

    "(" and ")" begin and end a group, a number repeats what is before it, and any other text is a symbol.
    """
    sums, last = [0], 0  # per open group; size of the last symbol or group
    for symbol in symbols:
        if symbol == "(":
            sums.append(0)
            last = 0
        elif symbol == ")" and len(sums) > 1:
            last = sums.pop()
            sums[-1] += last
        elif isinstance(symbol, int):
            more = last * (symbol - 1)
            sums[-1], last = sums[-1] + more, last + more
        else:
            last = 1
            sums[-1] += 1
    return sum(sums)


def expanded_size(regex: str) -> int:
    """Return the number of characters and classes after expanding counted repetitions."""
    return expanded(_symbols(regex))


def _symbols(regex: str) -> Iterator[str | int]:
    place = 0
    while place < len(regex):
        character = regex[place]
        if character == "{" and (count := _COUNT.match(regex, place)):
            yield copies(count[1], count[2])
            place = count.end()
        elif character in "()*+?|":
            if character in "()":
                yield character
            place += 1
        else:
            yield character
            place = _atom_end(regex, place)


def _atom_end(regex: str, place: int) -> int:
    """Return the end of the character, escape or (possibly nested) class that starts here."""
    depth = 0
    while place < len(regex):
        found = _ESCAPED.match(regex, place)
        if found is not None:
            place = found.end()
        elif regex[place] == "[":
            depth += 1
            place += 2 if regex.startswith("[^", place) else 1
            place += regex.startswith("]", place)
        else:
            depth -= depth > 0 and regex[place] == "]"
            place += 1
        if not depth:
            break
    return place


DATA = frozenset({"const", "enum", "default", "examples", "x-guidance"})
"""Keywords whose values are not schemas."""

NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values map user-defined names to schemas."""


def keywords(schema: object) -> Iterator[tuple[str, Any]]:
    """Yield every (keyword, value) of a schema and its sub-schemas."""
    remaining = [schema]
    while remaining:
        now = remaining.pop()
        if isinstance(now, list):
            remaining += now
        elif isinstance(now, dict):
            for keyword, value in now.items():
                yield keyword, value
                if keyword in NAMED and isinstance(value, dict):
                    remaining += value.values()
                elif keyword not in DATA:
                    remaining.append(value)


SCHEMA = "%json"


class Kind(Enum):
    """Kind of a grammar part."""

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
    value: Any = None  # parsed JSON


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
    """Yield the parts of a Lark or GBNF grammar in order; joined, they are its text."""
    from llguidance.gbnf_to_lark import is_lark_syntax

    scanner, place = _LARK if is_lark_syntax(grammar) else _GBNF, 0
    while found := scanner.search(grammar, place):
        if found.start() > place:
            yield GrammarPart(Kind.RULES, grammar[place : found.start()])
        place = found.end()
        if found.lastgroup != "JSON":
            yield GrammarPart(Kind[str(found.lastgroup)], found[0])
            continue
        yield GrammarPart(Kind.RULES, found[0])
        try:
            value, end = json.JSONDecoder().raw_decode(grammar, place)
        except (ValueError, RecursionError):  # the parser will report the error
            yield GrammarPart(Kind.RULES, grammar[place:])
            return
        yield GrammarPart(
            Kind.SCHEMA if found[0].startswith(SCHEMA) else Kind.OTHER, grammar[place:end], value
        )
        place = end
    if place < len(grammar):
        yield GrammarPart(Kind.RULES, grammar[place:])
