r"""Guided expressions have ASCII classes, and the patterns of JSON schemas are those of ECMA-262."""

import json

import pytest

from foreword.errors import RequestError
from foreword.structured.compiled import GrammarTokens
from foreword.structured.compiler import Grammars
from foreword.structured.params import StructuredOutputs
from foreword.structured.state import GrammarError, unpacked

END = 256
BYTES = Grammars(
    lambda: GrammarTokens(
        [*(bytes([b]) for b in range(256)), b"<end>"], (END,), lambda t: list(t.encode()), (END,)
    )
)
THREE = "\u0663"  # a digit, in Arabic


def fits(wanted: StructuredOutputs, text: str) -> bool:
    state = BYTES.begin(wanted)
    try:
        state.commit([*text.encode()])
    except GrammarError:
        return False
    return bool(unpacked(state.masks((), ()), END + 1)[0, END])


@pytest.mark.parametrize(
    ("regex", "matching", "others"),
    [
        (r"\d", ["3"], [THREE, "a"]),
        (r"[\d]", ["3"], [THREE]),
        (r"[^\d]", ["a", THREE], ["3"]),
        (r"\D", ["a", THREE], ["3"]),
        (r"\w", ["a", "_", "7"], ["é", THREE]),
        (r"\W", ["é", "-"], ["a"]),
        (r"\s", [" ", "\n", "\v"], ["\u00a0"]),
        (r"\S", ["\u00a0", "a"], [" "]),
        (r"\\d", ["\\d"], ["\\3"]),
        (r"(?u)\d", ["3", THREE], []),
        (r"(?:(?u)\d)", ["3"], [THREE]),  # it must begin with the flag
        (r"\p{Nd}", ["3", THREE], []),
    ],
)
def test_classes_of_a_guided_expression_are_ascii_unless_it_says_otherwise(regex, matching, others):
    forms = [StructuredOutputs(regex=regex)]
    if r"\\" not in regex:
        forms.append(StructuredOutputs(grammar=f"start: /{regex}/"))
    for form in forms:
        assert all(fits(form, text) for text in matching)
        assert not any(fits(form, text) for text in others)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        (r"^\d$", ["3"], [THREE]),
        (r"^[\w-.]+$", ["a-b.c"], ["é"]),
        (r"^[\s-z]$", [" ", "-", "z"], ["y", "~"]),
        (r"^[a-]$", ["a", "-"], ["]", "b"]),
        (r"^\s$", [" ", "\u00a0", "\ufeff", "\u2028"], ["\u0085"]),
        (r"^[\s]$", ["\ufeff"], ["\u0085", "a"]),
        (r"^\S$", ["\u0085", "a"], ["\ufeff"]),
        (r"^.$", ["a", "é", "\u0085"], ["\n", "\r", "\u2028", "\u2029"]),
        (r"b", ["abc", "b"], ["ac"]),
        (r"^a|b$", ["ax", "xb"], ["x"]),
        (r"^\cJ$", ["\n"], ["J"]),
        (r"^\0$", ["\0"], ["0"]),
        (r"^[\b]$", ["\b"], ["b"]),
        (r"^\u0041\x42\/\-$", ["AB/-"], []),
        (r"^\ud83d\ude00$", ["\U0001f600"], []),
        (r"^\u{1F600}$", ["\U0001f600"], []),
        (r"^[^]$", ["a", "\n"], ["", "ab"]),
        (r"^[[:a]$", ["[", ":", "a"], ["b"]),
        (r"^[a&&b]$", ["a", "&", "b"], ["c"]),
        (r"^[+--]$", ["+", ",", "-"], ["a"]),
        (r"^[~~^]$", ["~", "^"], ["a"]),
        (r"^\<\>$", ["<>"], []),
        (r"^(?<year>[0-9]{4})$", ["2026"], ["26"]),
        (r"^\p{L}$", ["é"], ["3"]),
    ],
)
def test_a_pattern_means_what_it_does_in_ecma_262(pattern: str, matching, others):
    schema = {"type": "string", "pattern": pattern}
    names = {"type": "object", "patternProperties": {pattern: {"const": 1}}, "additionalProperties": False}
    for text in (*matching, *others):
        is_fit = text in matching
        written = json.dumps(text, ensure_ascii=False)
        assert fits(StructuredOutputs(json=schema), written) == is_fit
        assert fits(StructuredOutputs(json=names), f"{{{written}: 1}}") == is_fit


def test_patterns_of_tools_and_tags_are_the_same():
    schema = {"type": "string", "pattern": "^.$"}
    tool = StructuredOutputs(grammar=f"start: %json {json.dumps(schema)}")
    assert fits(tool, '"a"')
    assert not fits(tool, '"\u2028"')
    tag = {"structures": [{"begin": "<", "schema": schema, "end": ">"}], "triggers": ["<"]}
    assert fits(StructuredOutputs(structural_tag=tag), 'x<"a">')
    assert not fits(StructuredOutputs(structural_tag=tag), 'x<"\u2028">')


def test_a_pattern_that_is_only_data_stays_as_it_is():
    schema = {"const": {"pattern": "(?i)a."}, "default": {"pattern": "("}}
    assert fits(StructuredOutputs(json=schema), '{"pattern": "(?i)a."}')


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("(?i)a", "flags cannot be set"),
        ("(?P<n>a)", "groups begin with"),
        (r"\h", r"no escape \h"),
        (r"\A", r"no escape \A"),
        (r"\x{41}", r"no escape \x"),
        (r"\01", r"no escape \0"),
        ("[a", "a class is not closed"),
        ("a\\", "ends with a backslash"),
        (r"\bword", "lookarounds not supported"),
        ("(?=a)b", "look-around"),
        (r"(a)\1", "backreferences"),
    ],
)
def test_what_the_parser_or_ecma_262_does_not_have_is_refused(pattern: str, complaint: str):
    with pytest.raises(RequestError) as refused:
        BYTES.begin(StructuredOutputs(json={"type": "string", "pattern": pattern}))
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)
