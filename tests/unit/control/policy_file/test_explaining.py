"""What a file says about a request, in words."""

from foreword.control.policy_file.explaining import explain
from foreword.control.policy_file.matching import RequestTraits
from foreword.control.policy_file.parsing import parse_policy

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


CODE = RequestTraits(metadata={"task": "code"}, stream=True)


def test_it_names_the_rule_the_drafters_and_why():
    found = explain(POLICY, CODE)
    assert (found.cohort, found.label, found.max_depth, found.step_limit_ms) == ("code", "code/greedy", 4, 40)
    assert "metadata.task is code" in found.reason
    assert "rolled out from shadow" in found.drafters["head"]
    assert list(found.drafters) == ["ngram", "head"]


def test_it_names_what_did_not_fit():
    found = explain(POLICY, RequestTraits())
    assert found.cohort == "other"
    assert found.passed_over == {
        "code": "metadata.task is not given, not code",
        "quiet": "priority is , not batch",
    }
    assert found.drafters == {"the engine's own": "the rule names no drafters"}


def test_what_the_request_and_the_operator_forbid_wins():
    assert "always wins" in explain(POLICY, CODE, False).drafters["none"]
    assert list(explain(POLICY, CODE, {"method": "suffix"}).drafters) == ["suffix"]
    quiet = RequestTraits(priority="batch")
    assert "the cohort is off" in explain(POLICY, quiet, {"method": "suffix"}).drafters["none"]
    told = explain(POLICY, CODE, {"method": ["remote", "suffix"]}).drafters
    assert list(told) == ["suffix"]
    assert "none of the cohort's drafters uses nodes" in told["suffix"]
    assert list(explain(POLICY, CODE, {"method": "remote"}).drafters) == ["none"]
    assert list(explain(POLICY, RequestTraits(), {"method": "remote"}).drafters) == ["remote"]
