"""Two hundred structured outputs that try to take the engine's time or memory. Always the same ones."""

import json
import random
from collections.abc import Iterator
from typing import Any

AMBIGUOUS = 'root ::= s\ns ::= s s s | s s | "a" | "b" | ""'

Body = dict[str, Any]
"""The part of a request's body that prescribes the answer."""


def corpus() -> list[tuple[str, Body]]:
    """Names and bodies; in an order in which kinds are mixed."""
    made = [
        *_counts(),
        *_repetitions(),
        *_ambiguous(),
        *_alternations(),
        *_nested(),
        *_recursive(),
        *_enums(),
        *_automata(),
    ]
    random.Random(4).shuffle(made)
    return made[:200]


def _schema(schema: Any) -> Body:
    return {"structured_outputs": {"json": schema}}


def _counts() -> Iterator[tuple[str, Body]]:
    integers = {"type": "array", "items": {"type": "integer"}}
    for count in (9_999, 30_000, 300_000, 1_000_000, 30_000_000, 10**9, 10**18):
        for keyword in ("minItems", "maxItems"):
            yield f"{keyword} {count}", _schema({**integers, keyword: count})
            tool = {"type": "object", "properties": {"a": {**integers, keyword: count}}, "required": ["a"]}
            yield (
                f"tool {keyword} {count}",
                {"structured_outputs": {"grammar": f"start: %json {json.dumps(tool)}"}},
            )
        for keyword in ("minLength", "maxLength"):
            yield f"{keyword} {count}", _schema({"type": "string", keyword: count})
        for keyword in ("minProperties", "maxProperties"):
            yield f"{keyword} {count}", _schema({"type": "object", keyword: count})
        yield f"multipleOf {count}", _schema({"type": "integer", "multipleOf": count + 7})


def _repetitions() -> Iterator[tuple[str, Body]]:
    for count in (50, 1_000, 30_000_000):
        for regex in ("a{%d}", "(ab|c){0,%d}", "((a{%d}){%d}){%d}", "(.*a){%d}", "([ab]{0,%d}c?){0,%d}"):
            filled = regex.replace("%d", str(count))
            yield f"regex {filled}", {"structured_outputs": {"regex": filled}}
            yield f"pattern {filled}", _schema({"type": "string", "pattern": filled})
        for grammar in ('root ::= ("a" | "b"){%d}', 'root ::= (("a"{1,%d} "b"){1,%d} "c"?){1,%d}'):
            filled = grammar.replace("%d", str(count))
            yield f"grammar {filled}", {"structured_outputs": {"grammar": filled}}


def _ambiguous() -> Iterator[tuple[str, Body]]:
    yield "ambiguous", {"structured_outputs": {"grammar": AMBIGUOUS}}
    letters = ['"a"', "[a-z]", "[a-z ]", '" "', '"a" | "aa"', "[a-zA-Z0-9]", '"0" | "1"', '"a" s "b"']
    for letter in letters:
        for shape in ("s s s | s s", "s s", "s s s s", "s s? s", "s s | t\nt ::= s t | t s | s"):
            head, *more = shape.split("\n")
            rules = "\n".join([f'root ::= s\ns ::= {head} | {letter} | ""', *more])
            yield f"ambiguous {rules}", {"structured_outputs": {"grammar": rules}}
    for operators in (3, 12):
        rules = " | ".join(f'e "{chr(33 + i)}" e' for i in range(operators) if chr(33 + i) not in '"\\')
        yield (
            f"operators {operators}",
            {"structured_outputs": {"grammar": f"root ::= e\ne ::= {rules} | [0-9]"}},
        )
    yield "palindromes", {"structured_outputs": {"grammar": 'root ::= [a-z] root [a-z] | [a-z] | ""'}}


def _alternations() -> Iterator[tuple[str, Body]]:
    for count in (100, 1_500, 20_000):
        yield f"cases {count}", _schema({"anyOf": [{"const": f"v{i}"} for i in range(count)]})
        yield (
            f"words {count}",
            {"structured_outputs": {"regex": "|".join(f"{i}x{i * 7919}" for i in range(count))}},
        )
        rules = " | ".join(f'"{i}" root' for i in range(count))
        yield f"rules {count}", {"structured_outputs": {"grammar": f'root ::= {rules} | "."'}}
        names = {f"p{i}": {"type": "string"} for i in range(count)}
        yield f"properties {count}", _schema({"type": "object", "properties": names})
        yield f"required {count}", _schema({"type": "object", "properties": names, "required": list(names)})
        patterns = {f"^[a-z]*{i}[a-z]*$": {"type": "integer"} for i in range(min(count, 300))}
        yield f"patterns {count}", _schema({"type": "object", "patternProperties": patterns})


def _nested() -> Iterator[tuple[str, Body]]:
    for depth in (20, 60, 400):
        schema: Any = {"type": "integer"}
        for _ in range(depth):
            schema = {"type": "array", "items": schema, "minItems": 2, "maxItems": 50}
        yield f"arrays {depth}", _schema(schema)
        for pair in ("()", "[]"):
            nested = f"{pair[0] * depth}a{pair[1] * depth}"
            yield f"nested {pair} {depth}", {"structured_outputs": {"regex": nested}}
        grammar = f'root ::= {"(" * depth}"a"{")*" * depth}'
        yield f"stars {depth}", {"structured_outputs": {"grammar": grammar}}


def _recursive() -> Iterator[tuple[str, Body]]:
    yield "self", _schema({"anyOf": [{"$ref": "#"}, {"type": "integer"}]})
    for keyword in ("anyOf", "allOf", "oneOf"):
        for count in (20, 200):
            parts = {f"a{i}": {keyword: [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(count)}
            parts[f"a{count}"] = {"type": "null"}
            yield f"{keyword} chain {count}", _schema({"$ref": "#/$defs/a0", "$defs": parts})
    for count in (50, 300):
        names = " ".join(f"n{i}" for i in range(count))
        rules = "\n".join(f'n{i} ::= "{chr(97 + i % 26)}" | "" | n{(i + 1) % count}' for i in range(count))
        yield f"empty rules {count}", {"structured_outputs": {"grammar": f"root ::= {names}\n{rules}"}}
    yield "left", {"structured_outputs": {"grammar": 'root ::= e? root "x" | "y" | e\ne ::= "" | "z" | e e'}}


def _enums() -> Iterator[tuple[str, Body]]:
    for count in (5_000, 9_999, 20_000):
        yield f"enum {count}", _schema({"enum": [f"{i * 7919 % 100_003}" for i in range(count)]})
        yield f"numbers {count}", _schema({"enum": list(range(count))})
        yield f"choice {count}", {"structured_outputs": {"choice": [f"c{i}" for i in range(count)]}}
    yield "prefixes", {"structured_outputs": {"choice": ["x" * i + "y" for i in range(1, 650)]}}


def _automata() -> Iterator[tuple[str, Body]]:
    for count in (15, 60, 200):
        yield f"window {count}", {"structured_outputs": {"regex": f".*a.{{{count}}}c"}}
        yield f"windows {count}", {"structured_outputs": {"regex": f"(.*a.{{{count}}})*b"}}
    both = [{"pattern": f"{letter}.{{3}}{letter}"} for letter in "abcdefghijklmnop"]
    yield "patterns at once", _schema({"type": "string", "allOf": both})
    shifted = "|".join(f"[a-z]*{chr(97 + i)}[a-z]{{{i}}}" for i in range(26))
    yield "shifted", {"structured_outputs": {"regex": f"({shifted})*"}}
    yield "range", _schema({"type": "number", "minimum": -1.2345678901234e300, "maximum": 1e300})
