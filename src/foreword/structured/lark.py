"""The parts of a grammar's text: what stands between literals, regular expressions, comments and JSON."""

import json
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

SCHEMA = "%json"


class Kind(Enum):
    """What a part of a grammar is."""

    RULES = "rules"  # names, operators and counts
    LITERAL = "literal"
    REGEX = "regex"  # between slashes, or a class in brackets
    COMMENT = "comment"
    SCHEMA = "schema"  # the JSON after %json
    OTHER = "other"  # the JSON after another directive


class Part(NamedTuple):
    """A part of a grammar, as it is written."""

    kind: Kind
    text: str
    value: Any = None  # of JSON


_LITERAL = r'"(?:\\.|[^"\\])*"'
_LARK = re.compile(
    rf"(?P<LITERAL>{_LITERAL})|(?P<COMMENT>//[^\n]*|\#[^\n]*)|(?P<REGEX>/(?:\\.|[^/\\\n])+/)"
    r"|(?P<JSON>%(?:json|regex|llguidance)\s*(?=[{\[]))",
    re.DOTALL,
)
_GBNF = re.compile(
    rf"(?P<LITERAL>{_LITERAL})|(?P<COMMENT>\#[^\n]*)|(?P<REGEX>\[(?:\\.|[^\]\\])*\])", re.DOTALL
)


def parts(grammar: str) -> Iterator[Part]:
    """Yield the parts of a Lark or GBNF grammar in order; together they are its text."""
    from llguidance.gbnf_to_lark import is_lark_syntax

    scanner, place = _LARK if is_lark_syntax(grammar) else _GBNF, 0
    while found := scanner.search(grammar, place):
        if found.start() > place:
            yield Part(Kind.RULES, grammar[place : found.start()])
        place = found.end()
        if found.lastgroup != "JSON":
            yield Part(Kind[str(found.lastgroup)], found[0])
            continue
        yield Part(Kind.RULES, found[0])
        try:
            value, end = json.JSONDecoder().raw_decode(grammar, place)
        except (ValueError, RecursionError):  # the parser says what is wrong with it
            yield Part(Kind.RULES, grammar[place:])
            return
        yield Part(Kind.SCHEMA if found[0].startswith(SCHEMA) else Kind.OTHER, grammar[place:end], value)
        place = end
    if place < len(grammar):
        yield Part(Kind.RULES, grammar[place:])
