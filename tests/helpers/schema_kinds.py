"""JSON schemas of one kind each: types, enums, ranges, texts, arrays, objects."""

from collections.abc import Iterator
from typing import Any

Made = Iterator[tuple[str, dict[str, Any], tuple[Any, ...], tuple[Any, ...]]]


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def types() -> Made:
    values = {
        "string": "x",
        "integer": 3,
        "number": 2.5,
        "boolean": True,
        "null": None,
        "array": [1],
        "object": {"a": 1},
    }
    for kind, value in values.items():
        others = [
            other for name, other in values.items() if name != kind and (kind, name) != ("number", "integer")
        ]
        yield f"type {kind}", {"type": kind}, (value,), tuple(others)
    for first, second in (
        ("string", "null"),
        ("integer", "null"),
        ("boolean", "string"),
        ("array", "null"),
        ("number", "string"),
        ("object", "null"),
    ):
        wrong = [
            v
            for name, v in values.items()
            if name not in (first, second) and not ("number" in (first, second) and name == "integer")
        ]
        yield f"{first} or {second}", {"type": [first, second]}, (values[first], values[second]), tuple(wrong)


def enums() -> Made:
    lists: tuple[list[Any], ...] = (
        ["a"],
        ["a", "b"],
        ["a", "ab", "abc"],
        [1, 2, 3],
        [1, "1"],
        [None, False],
        [True],
        [0.5, 1],
        ["with space", 'with "quotes"'],
        ["é", "😀", "日本"],
        [[1, 2], {"a": 1}],
        [f"value {i}" for i in range(200)],
    )
    for number, values in enumerate(lists):
        yield f"enum {number}", {"enum": values}, tuple(values[:3]), ("no such value", 77)
    for value in ("x", 5, None, True, [1], {"a": "b"}):
        yield f"const {value}", {"const": value}, (value,), ("other", 6)


def integers() -> Made:
    for low, high in (
        (0, 9),
        (1, 100),
        (-5, 5),
        (10, 10),
        (0, 255),
        (-1000, -1),
        (1, 31),
        (1900, 2100),
        (0, 10**9),
    ):
        schema = {"type": "integer", "minimum": low, "maximum": high}
        yield f"integer {low} to {high}", schema, (low, high, (low + high) // 2), (low - 1, high + 1, "x")
    yield "integer from 3", {"type": "integer", "minimum": 3}, (3, 12345), (2, -3)
    yield "integer to 3", {"type": "integer", "maximum": 3}, (3, -99), (4,)
    between = {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 5}
    yield "integer between", between, (1, 4), (0, 5)
    for step in (2, 5, 10):
        yield f"multiple of {step}", {"type": "integer", "multipleOf": step}, (step, 3 * step), (step + 1,)


def numbers() -> Made:
    for low, high in ((0, 1), (-1.5, 1.5), (0.1, 0.9), (10, 20), (-3, 0)):
        schema = {"type": "number", "minimum": low, "maximum": high}
        yield f"number {low} to {high}", schema, (low, high), (low - 1, high + 0.5)
    yield "number above 0", {"type": "number", "exclusiveMinimum": 0}, (0.5, 3), (-1,)


def strings() -> Made:
    for low, high in ((0, 3), (1, 1), (2, 5), (3, 10), (0, 40), (5, 100)):
        schema = {"type": "string", "minLength": low, "maxLength": high}
        wrong = ("x" * (high + 1), *(("x" * (low - 1),) if low else ()))
        yield f"string of {low} to {high}", schema, ("x" * low, "x" * high), wrong
    yield "string from 4", {"type": "string", "minLength": 4}, ("abcd",), ("abc",)
    yield "string to 4", {"type": "string", "maxLength": 4}, ("", "éééé"), ("abcde",)


def patterns() -> Made:
    cases = {
        "^[a-z]+$": ("abc", "Abc"),
        "^[0-9]{3}-[0-9]{4}$": ("555-1234", "5551234"),
        "^(yes|no)$": ("yes", "maybe"),
        "^[A-Z]{2}[0-9]{2}$": ("AB12", "AB1"),
        "^#[0-9a-f]{6}$": ("#00ff7f", "#00ff7"),
        "^(a|b)*c$": ("ababc", "abab"),
        "^[^@ ]+@[^@ ]+$": ("a@b", "ab"),
        "^v[0-9]+\\.[0-9]+\\.[0-9]+$": ("v1.2.3", "v1.2"),
        "^.{2}$": ("é1", "x"),
        "^$": ("", "x"),
        "^\\w+$": ("word_1", "two words"),
        "^[+-]?[0-9]+$": ("-5", "5-"),
        "^([01][0-9]|2[0-3]):[0-5][0-9]$": ("23:59", "24:00"),
    }
    for pattern, (good, bad) in cases.items():
        yield f"pattern {pattern}", {"type": "string", "pattern": pattern}, (good,), (bad,)


def formats() -> Made:
    cases = {
        "date": ("2024-02-29", "2024-2-9"),
        "time": ("12:34:56Z", "12:34"),
        "date-time": ("2024-01-02T03:04:05Z", "2024-01-02"),
        "email": ("someone@example.org", "someone"),
        "uuid": ("123e4567-e89b-12d3-a456-426614174000", "123e4567"),
        "ipv4": ("192.168.0.1", "192.168.0"),
        "hostname": ("example.org", "-example"),
        "duration": ("P3D", "3 days"),
    }
    for name, (good, bad) in cases.items():
        yield f"format {name}", {"type": "string", "format": name}, (good,), (bad,)


def arrays() -> Made:
    for low, high in ((0, 2), (1, 1), (1, 3), (2, 4), (0, 8)):
        schema = {"type": "array", "items": {"type": "integer"}, "minItems": low, "maxItems": high}
        yield f"array of {low} to {high}", schema, ([1] * low, [1] * high), ([1] * (high + 1), ["x"])
    for item in ({"type": "string"}, {"type": "boolean"}, {"enum": [1, "a"]}, {"type": "null"}):
        good = {"string": "x", "boolean": False, "null": None}.get(str(item.get("type")), 1)
        yield f"array of {item}", {"type": "array", "items": item}, ([], [good], [good, good]), ([[good]], {})
    yield (
        "array of arrays",
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        ([[1], []],),
        ([1],),
    )
    pair = {
        "type": "array",
        "prefixItems": [{"type": "string"}, {"type": "integer"}],
        "items": False,
        "minItems": 2,
    }
    yield "pair", pair, (["a", 1],), (["a"], [1, "a"], ["a", 1, 2])
    more = {"type": "array", "prefixItems": [{"const": "p"}], "items": {"type": "integer"}}
    yield "prefix", more, (["p"], ["p", 1, 2]), (["q"], ["p", "p"])
    yield "empty array", {"type": "array", "maxItems": 0}, ([],), ([1],)
    yield "at least one", {"type": "array", "minItems": 1, "items": {"type": "boolean"}}, ([True],), ([],)
    yield (
        "array of objects",
        {"type": "array", "items": closed(a={"type": "integer"})},
        ([{"a": 1}],),
        ([{"b": 1}],),
    )


def objects() -> Made:
    names = ("a", "b", "c")
    for required in range(4):
        schema = {
            "type": "object",
            "properties": {name: {"type": "integer"} for name in names},
            "required": list(names[:required]),
            "additionalProperties": False,
        }
        least = dict.fromkeys(names[:required], 1)
        yield (
            f"{required} of 3 required",
            schema,
            (least, {"a": 1, "b": 2, "c": 3}),
            ({"d": 1}, [], {"a": "x"}),
        )
    for depth in range(1, 9):
        schema, good = {"type": "integer"}, 1  # type: ignore[assignment]
        for level in range(depth):
            schema, good = closed(**{f"k{level}": schema}), {f"k{level}": good}  # type: ignore[dict-item,assignment]
        yield f"nested {depth}", schema, (good,), ({}, 1)
    for inner in ({"type": "integer"}, {"type": "string"}, {"type": "array", "items": {"type": "null"}}):
        value = {"integer": 1, "string": "x"}.get(str(inner["type"]), [None])
        schema = {"type": "object", "additionalProperties": inner}
        yield f"any keys to {inner['type']}", schema, ({}, {"x": value, "y": value}), ({"x": {}},)
    mixed = {
        "type": "object",
        "properties": {"id": {"type": "integer"}},
        "required": ["id"],
        "additionalProperties": {"type": "string"},
    }
    yield "known and other keys", mixed, ({"id": 1}, {"id": 1, "note": "x"}), ({"note": "x"}, {"id": "x"})
    by_name = {
        "type": "object",
        "patternProperties": {"^n_": {"type": "integer"}},
        "additionalProperties": False,
    }
    yield "keys by pattern", by_name, ({"n_a": 1},), ({"x": 1}, {"n_a": "x"})
    yield (
        "long keys",
        closed(**{f"a_rather_long_name_of_a_key_{i}": {"type": "boolean"} for i in range(6)}),
        ({f"a_rather_long_name_of_a_key_{i}": True for i in range(6)},),
        ({},),
    )
    yield (
        "many keys",
        closed(**{f"k{i}": {"type": "null"} for i in range(60)}),
        ({f"k{i}": None for i in range(60)},),
        ({"k0": None},),
    )
    yield (
        "optional keys",
        {
            "type": "object",
            "properties": {f"o{i}": {"const": i} for i in range(12)},
            "additionalProperties": False,
        },
        ({}, {"o3": 3, "o7": 7}),
        ({"o3": 4},),
    )
    yield "empty object", {"type": "object", "additionalProperties": False}, ({},), ({"a": 1},)
