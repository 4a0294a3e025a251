"""Grammars are compiled once, within limits, and what is wrong with them is said in one line."""

import pytest

from foreword.errors import RequestError
from foreword.structured.compiler import Grammars
from foreword.structured.compiling import failing_alternative
from foreword.structured.params import StructuredOutputs
from helpers.tiny_grammars import allowed, grammars, token_table

KEPT = grammars()


def test_a_grammar_is_compiled_once_however_it_is_written():
    kept = grammars()
    first = StructuredOutputs(json={"type": "object", "properties": {}})
    same = StructuredOutputs(json='{"type": "object",\n "properties": {}}')
    assert not kept.is_ready(first)
    kept.begin(first)
    assert kept.is_ready(same)
    assert kept.is_ready(None)
    assert not kept.is_ready(StructuredOutputs(json=str(same.json), disable_any_whitespace=True))


@pytest.mark.parametrize(
    ("options", "text", "fits"),
    [
        ({}, '{"a": 1, "b": 1}', True),
        ({}, '{"a":1,"b":1}', False),
        ({"disable_any_whitespace": True}, '{"a":1,"b":1}', True),
        ({"whitespace_pattern": r"[ \n]*"}, '{\n"a":  1,"b":1}', True),
        ({}, '{"a": 1, "b": 1, "c": 1}', True),
        ({"disable_additional_properties": True}, '{"a": 1, "b": 1, "c": 1}', False),
    ],
)
def test_how_json_is_laid_out(options, text: str, fits: bool):
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 1}}, "required": ["a", "b"]}
    state = KEPT.begin(StructuredOutputs(json=schema, **options))
    table = token_table()
    tokens = [table.pieces.index(bytes([byte])) for byte in text.encode()]
    is_fit = all(state.masks_after([tuple(tokens[:place])]).any() for place in range(len(tokens)))
    try:
        for token in tokens:
            state.commit([token])
        is_fit = is_fit and allowed(state)[:1] == [b"<end>"]
    except ValueError:
        is_fit = False
    assert is_fit == fits


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, '"uniqueItems", which is not supported'),
        ({"json": {"not": {"type": "string"}}}, '"not", which is not supported'),
        ({"regex": r"a[^\s\S]"}, "regex: no text fits the grammar"),
        ({"grammar": "root ::= root"}, "grammar: no text fits the grammar"),
        ({"json": {"if": {}, "then": {}}}, '"if", "then", which is not supported'),
        ({"json": {"type": "array", "contains": {}}}, '"contains", which is not supported'),
        ({"json": {"type": "object", "dependentRequired": {"a": ["b"]}}}, '"dependentRequired"'),
        ({"json": {"type": "object", "propertyNames": {"pattern": "a"}}}, '"propertyNames"'),
        ({"json": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}}, '"oneOf"'),
        ({"json": {"type": "strong"}}, "Invalid type: strong"),
        ({"json": {"type": "string", "format": "colour"}}, "Unknown format: colour"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
        ({"json": {"$ref": "#/$defs/missing"}}, "does not exist"),
        ({"json": {"$ref": "https://schemas.example/one"}}, "not present"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "json: "),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(a)\\1"}, "backreferences are not supported"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": 'root ::= "a'}, "grammar cannot be read"),
        ({"grammar": "root ::= missing"}, "Rule 'missing' not found"),
        ({"grammar": 'start: "a" b'}, "grammar: "),
        ({"structural_tag": {"triggers": ["<f"]}}, "structural_tag needs"),
        (
            {"structural_tag": {"triggers": ["<f"], "structures": [{"begin": "<g>", "schema": {}}]}},
            "none of the triggers",
        ),
        (
            {"structural_tag": {"triggers": ["<f"], "structures": [{"begin": "<f>"}]}},
            "structure 0 has no schema: give",
        ),
        (
            {"structural_tag": {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": "{}"}]}},
            "structure 0 has a schema that is not an object: give",
        ),
        (
            {
                "structural_tag": {
                    "triggers": ["<f"],
                    "structures": [{"begin": "<f>", "schema": {}, "end": 1}],
                }
            },
            '"end" must be a text',
        ),
        ({"structural_tag": {"triggers": ["<f"], "structures": [{"end": "x"}]}}, '"begin" must be a text'),
    ],
)
def test_what_cannot_be_had_is_refused_by_its_name(wanted, complaint: str):
    with pytest.raises(RequestError) as refused:
        KEPT.begin(StructuredOutputs.of(wanted))
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("structured outputs: ")


def test_tags_prescribe_a_part_of_a_text():
    tag = {
        "structures": [{"begin": "<x a>", "schema": {"const": 1}, "end": "</x>"}],
        "triggers": ["<x"],
    }
    pieces = [bytes([byte]) for byte in range(32, 127)]
    table = token_table()
    kept = Grammars(
        lambda: type(table)(
            [*table.pieces[:3], *pieces],
            table.end_ids,
            lambda text: [byte - 29 for byte in text.encode()],
            (0, 1, 2),
        )
    )
    state = kept.begin(StructuredOutputs(structural_tag=tag))

    def follows(text: str) -> bool:
        tokens = [byte - 29 for byte in text.encode()]
        return state.follows(tokens, range(-1, len(tokens) - 1))[-1]

    assert follows("any text < x or <y")
    assert follows("then <x a>1</x> and more <x a>1</x>")
    assert not follows("then <x b")
    assert not follows("then <x a>2")


def test_a_model_without_an_end_has_no_forms():
    table = token_table()
    with pytest.raises(RequestError, match="end-of-sequence"):
        Grammars(lambda: type(table)(table.pieces, (), table.encode)).begin(StructuredOutputs(regex="a"))


@pytest.mark.parametrize("schema", ["5", '{"anyOf": 5}', '{"items": [], "anyOf": [1, {"title": 2}]}', "{"])
def test_any_json_inside_a_grammar_is_read_without_a_fault(schema: str):
    assert failing_alternative(StructuredOutputs(grammar=f"start: %json {schema}"), lambda one: True) == ""
