"""What may be asked of an answer's form."""

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.errors import RequestError
from foreword.structured.params import MAX_BYTES, StructuredOutputs


def test_one_form_is_given():
    assert StructuredOutputs(json={"type": "object"}) == StructuredOutputs(json='{"type":"object"}')
    assert StructuredOutputs(choice=["a", "b", "a"]).choice == ("a", "b")
    params = SamplingParams(structured={"regex": "a"})  # type: ignore[arg-type]
    assert params.structured == StructuredOutputs(regex="a")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "give one of"),
        ({"regex": "a", "json": {}}, "not json, regex"),
        ({"json": "{"}, "json is not JSON"),
        ({"json": [1]}, "json must be a JSON object"),
        ({"json": True}, "json must be a JSON object"),
        ({"json": {"const": float("nan")}}, "json is not JSON"),
        ({"json": {"const": object()}}, "json is not JSON"),
        ({"regex": ""}, "regex must be a non-empty text"),
        ({"regex": "\ud800"}, "a lone surrogate"),
        ({"choice": []}, "choice must be a list"),
        ({"choice": "abc"}, "choice must be a list"),
        ({"choice": ["a", ""]}, "choice must be a list"),
        ({"choice": ["a"] + [str(i) for i in range(20_000)]}, "more than 10000 texts"),
        ({"grammar": 5}, "grammar must be a non-empty text"),
        ({"json_object": 1}, "json_object must be true or false"),
        (
            {"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True},
            "exclude each other",
        ),
        (
            {"regex": "a", "whitespace_pattern": " "},
            "whitespace_pattern is for json and json_object; .* regex",
        ),
        ({"choice": ["a"], "disable_any_whitespace": True}, "disable_any_whitespace is for json"),
        (
            {"grammar": "x", "disable_additional_properties": True},
            "disable_additional_properties is for json",
        ),
        ({"regex": "a" * (MAX_BYTES + 1)}, "longer than"),
        ({"guided": "x"}, "unknown key 'guided'"),
        ([], "must be an object"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(given, complaint: str):
    with pytest.raises(RequestError, match=complaint) as refused:
        StructuredOutputs.of(given)
    assert "\n" not in str(refused.value)


def test_a_schema_that_nests_too_deep_is_refused():
    schema: dict = {}
    for _ in range(2000):
        schema = {"properties": {"a": schema}}
    with pytest.raises(RequestError, match="is nested deeper"):
        StructuredOutputs(json=schema)
    with pytest.raises(RequestError):
        StructuredOutputs(json='{"a":' * 100_000 + "1" + "}" * 100_000)


def test_an_answer_of_a_form_has_an_end():
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(structured=StructuredOutputs(json_object=True), ignore_eos=True)
