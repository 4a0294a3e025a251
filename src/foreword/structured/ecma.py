"""Patterns of JSON schemas: from ECMA-262's syntax to the parser's."""

import re
import string

from foreword.errors import RequestError

_SPACES = r"\t\n\x0B\f\r \u{A0}\u{1680}\u{2000}-\u{200A}\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}\u{FEFF}"
"""ECMA-262's white space and line ends, inside a class."""

_OUTSIDE = {"s": f"[{_SPACES}]", "S": f"[^{_SPACES}]", "0": r"\x00", "<": "<", ">": ">"}
_IN_CLASS = {**_OUTSIDE, "s": _SPACES, "b": r"\x08"}
"""What the parser reads for an escape; other escapes mean the same to it."""

_KNOWN = frozenset(string.punctuation + "sS0123456789bBk")
"""Escapes of one character. Back references and word boundaries are refused by the parser."""

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
"""Signs that ECMA-262 takes literally inside a class, and the parser does not."""


class EcmaPattern:
    """Translates a pattern of a JSON schema from ECMA-262's syntax, with its flag u, into the parser's."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._place = 0

    def translated(self) -> str:
        """Return the pattern as the parser reads it; raises `RequestError` for what ECMA-262 does not have."""
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
