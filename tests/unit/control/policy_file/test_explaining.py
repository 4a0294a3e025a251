"""What a file says about a request, in words."""

from typing import Any

import pytest

from foreword.control.policy_file.explaining import explain, traits_of
from foreword.control.policy_file.parsing import parse_policy
from foreword.errors import RequestError

POLICY = parse_policy(
    {
        "version": 1,
        "drafters": {"ngram": {"method": "ngram"}, "head": {"method": "eagle3"}},
        "cohorts": [
            {
                "name": "code",
                "match": {"metadata.task": "code"},
                "drafters": ["head", "ngram"],
                "max_depth": 4,
            },
            {"name": "quiet", "match": {"priority": "batch"}, "state": "off"},
        ],
        "rollout": {"pair": ["head", "code"]},
        "latency": {"chat": {"match": {"stream": True}, "tpot_ms": 40}},
    }
)


def test_it_tells_the_rule_the_drafters_and_why():
    traits, notes = traits_of(
        {"prompt": [1, 2, 3], "temperature": 0, "metadata": {"task": "code"}, "stream": True}
    )
    found = explain(POLICY, traits)
    assert (found.cohort, found.label, found.max_depth, found.step_limit_ms) == ("code", "code/greedy", 4, 40)
    assert "metadata.task is code" in found.reason
    assert "rolled out from shadow" in found.drafters["head"]
    assert list(found.drafters) == ["ngram", "head"]
    assert not notes


@pytest.mark.parametrize("form", [{"guided_regex": "a"}, {"response_format": {"type": "json_object"}}, {}])
def test_forms_and_adapters_are_those_that_the_engine_sees(form: dict[str, Any]):
    traits, _ = traits_of({"prompt": [1], "temperature": None, **form}, adapter="sql")
    assert (traits.json_schema, traits.adapter, traits.temperature) == (bool(form), "sql", 1.0)


@pytest.mark.parametrize("temperature", ["hot", True, -4, [1]])
def test_a_temperature_that_is_none_is_refused(temperature: object):
    with pytest.raises(RequestError, match="temperature must be a number"):
        traits_of({"prompt": [1], "temperature": temperature})


def test_it_tells_what_did_not_fit_and_what_was_guessed():
    traits, notes = traits_of({"messages": [{"role": "user", "content": "x" * 400}]})
    found = explain(POLICY, traits)
    assert found.cohort == "other"
    assert found.passed_over == {
        "code": "metadata.task is not given, not code",
        "quiet": "priority is , not batch",
    }
    assert len(notes) == 2
    assert found.drafters == {"the engine's own": "the rule names no drafters"}


def test_what_the_request_and_the_operator_forbid_wins():
    traits, _ = traits_of({"prompt": [1], "metadata": {"task": "code"}})
    assert "always wins" in explain(POLICY, traits, False).drafters["nobody"]
    assert list(explain(POLICY, traits, {"method": "suffix"}).drafters) == ["suffix"]
    quiet, _ = traits_of({"prompt": [1], "priority": "batch"})
    assert "the cohort is off" in explain(POLICY, quiet, {"method": "suffix"}).drafters["nobody"]
    told = explain(POLICY, traits, {"method": ["remote", "suffix"]}).drafters
    assert list(told) == ["suffix"]
    assert "none of the cohort's drafters asks any" in told["suffix"]
    assert list(explain(POLICY, traits, {"method": "remote"}).drafters) == ["nobody"]
    other, _ = traits_of({"prompt": [1]})
    assert list(explain(POLICY, other, {"method": "remote"}).drafters) == ["remote"]
