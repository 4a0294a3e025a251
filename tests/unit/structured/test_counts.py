"""Counts are bounded before anything is compiled, wherever they stand."""

import pytest

from foreword.errors import RequestError
from foreword.structured.dialects import regex_size
from foreword.structured.limits import check_counts
from foreword.structured.params import StructuredOutputs
from helpers.tiny_grammars import grammars

ARRAY = {"type": "array", "items": {"type": "integer"}, "minItems": 30_000_000}
TAG = {"structures": [{"begin": "<", "schema": ARRAY, "end": ">"}], "triggers": ["<"]}


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        ({"json": ARRAY}, "json: minItems is 30000000, the limit is 10000"),
        ({"json": {"type": "array", "maxItems": 1e9}}, "maxItems is 1000000000, the limit is 10000"),
        ({"json": {"properties": {"a": {"anyOf": [ARRAY]}}}}, "minItems"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"items": ARRAY}}}}, "minItems"),
        ({"json": {"type": "string", "minLength": 30_000_000}}, "minLength"),
        ({"json": {"type": "string", "maxLength": 10**30}}, "maxLength is 1e+30"),
        ({"json": {"type": "string", "maxLength": 10**400}}, "maxLength is 1e+400"),  # no float is as large
        ({"json": {"type": "object", "maxProperties": 1e9}}, "maxProperties"),
        ({"json": {"type": "object", "minProperties": 1e9}}, "minProperties"),
        ({"json": {"type": "integer", "multipleOf": 1_000_003}}, "multipleOf without its decimal point"),
        ({"json": {"type": "number", "multipleOf": 0.0100003}}, "multipleOf without its decimal point"),
        ({"json": {"type": "string", "pattern": "^(a{1000}){1000}$"}}, "pattern: symbols"),
        ({"json": {"patternProperties": {"a{9000000}": {}}}}, "patternProperties: symbols"),
        ({"json": {"enum": list(range(20_000))}}, "enum values: 20000"),
        ({"json": {"items": {"minItems": 9_000}, "minItems": 9_000, "maxItems": 9_000}}, "of all arrays"),
        ({"json": {"allOf": [{"minItems": 9_000}] * 3 + [{"maxItems": -(10**9)}]}}, "of all arrays: 27000"),
        ({"json": {"properties": {f"p{i}": {} for i in range(2_001)}}}, "properties: 2001"),
        ({"json": {"anyOf": [{"const": i} for i in range(2_001)]}}, "cases of anyOf"),
        ({"json_object": True, "whitespace_pattern": " {0,9000000}"}, "whitespace_pattern: symbols"),
        ({"regex": "((a{99}){99}){99}"}, "regex: symbols with all repetitions written out: 970299"),
        ({"regex": "a{99999999999999999999}"}, "too many, the limit is 300000"),
        ({"grammar": 'root ::= ("a" | "b"){30000000}'}, "grammar: symbols"),
        ({"grammar": 'root ::= (("a"{1000} "b"){1,1000})'}, "grammar: symbols"),
        ({"grammar": 'root ::= "a"{1000}{1000}'}, "grammar: symbols"),
        ({"grammar": "start: A\nA: /a{3000000}/"}, "grammar: symbols"),
        ({"grammar": 'start: "a"~1..9000000'}, "grammar: symbols"),
        ({"grammar": 'start: "a" %json {"type": "array", "maxItems": 30000000}'}, "grammar: maxItems"),
        ({"structural_tag": TAG}, "structural_tag: minItems"),
    ],
)
def test_a_count_beyond_its_limit_is_refused_without_compiling(wanted, complaint: str, monkeypatch):
    monkeypatch.setattr("foreword.structured.compiler.Grammars._compiled", lambda *_: pytest.fail("compiled"))
    with pytest.raises(RequestError) as refused:
        grammars().begin(StructuredOutputs.of(wanted))
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": {"properties": {"minItems": {"type": "integer"}}, "required": ["minItems"]}},
        {"json": {"const": ARRAY, "default": ARRAY, "enum": [ARRAY], "examples": [ARRAY]}},
        {"json": {"type": "array", "minItems": 10_000, "maxItems": 10_000}},
        {"json": {"multipleOf": 0.01, "type": "number", "maxLength": 1_000_000}},
        {"json": {"multipleOf": 86_400_000, "minItems": True, "pattern": 5, "enum": 3, "anyOf": {}}},
        {"regex": r"[a{999999999}]\x{41}\{999999999\}(?:ab|[0-9]{1,40}){1,200}"},
        {"grammar": 'root ::= "a{99999999}" [{9}]{3} # x{99999999}'},
        {"grammar": 'start: "x~99999999" /[a]{4}/ // x{99999999}'},
        {"choice": ["a{99999999}"]},
        {"structural_tag": {"structures": 5}},
        {"structural_tag": {"structures": [5]}},
    ],
)
def test_what_is_within_limits_or_is_no_count_is_taken(wanted):
    check_counts(StructuredOutputs.of(wanted))


@pytest.mark.parametrize(
    ("regex", "size"),
    [
        ("a", 1), ("a{5}", 5), ("a{2,}", 2), ("(ab|c){0,10}", 30), ("(?:a{3}b){2,4}", 20), ("[a{5}b]{3}", 3),
        (r"\x{41}{3}", 3), (")a{3}", 4), ("[[:alpha:]]{7}", 7), (r"\p{Nd}{2}", 2), ("[]{9}]", 1), ("a{0}", 1),
        ("a{,5}", 5), (r"(\({3}", 3),
    ],
)  # fmt: skip
def test_the_size_of_an_expression(regex: str, size: int):
    assert regex_size(regex) == size


def test_a_text_of_brackets_is_read_in_one_go():
    for text in ("(" * 200_000, "[" * 200_000, "(a" * 60_000 + ")" * 60_000):
        regex_size(text)
