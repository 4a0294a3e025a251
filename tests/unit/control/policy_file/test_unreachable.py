"""Rules that no request can match are named with the reason; rules that one can match are not."""

import json
from pathlib import Path
from typing import Any

import pytest

from foreword.control.policy_file.parsing import parse_policy, read_policy
from foreword.control.policy_file.unreachable import Findings, unreachable
from foreword.errors import RequestError


def found(*matches: dict[str, Any], **more: Any) -> Findings:
    cohorts = [{"name": f"c{place}", "match": match} for place, match in enumerate(matches)]
    return unreachable(parse_policy({"version": 1, "cohorts": cohorts, **more}))


def shadowed(*matches: dict[str, Any]) -> list[str]:
    return [line for line in found(*matches).warnings if "before it" in line]


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({}, {"tenant": "a"}),
        ({"tenant": "*"}, {"stream": True}),
        ({"tenant": "bank-*"}, {"tenant": "bank-7"}),
        ({"tenant": "bank-*"}, {"tenant": ["bank-7*", "bank-?"], "stream": True}),
        ({"temperature": [0, None]}, {"json_schema": True}),
        ({"temperature": [0.2, 1]}, {"temperature": [0.3, 0.9]}),
        ({"stream": True}, {"stream": True, "model": "m"}),
        ({"metadata.team": "*"}, {"metadata.team": "x"}),
    ],
)
def test_a_rule_after_one_that_matches_all_its_requests(first: dict[str, Any], later: dict[str, Any]):
    (line,) = shadowed({"model": "z"}, first, later)
    expected = (
        "cohorts[2] 'c2' can never match: cohorts[1] 'c1' before it matches every request that it matches"
    )
    assert line == expected
    assert shadowed(later, first) == []


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ([{"stream": True}, {"stream": False}], {}),
        ([{"temperature": [None, 0.5]}, {"temperature": [0.5, None]}], {"stream": True}),
        ([{"temperature": [0.5, 1]}, {"temperature": [1, None]}], {"temperature": [0.6, None]}),
        ([{"tenant": "a*"}, {"tenant": "b*"}], {"tenant": ["a1", "b1"]}),
        ([{"prompt_tokens": [1, 5]}, {"prompt_tokens": [4.5, None]}], {"tenant": "x"}),
        ([{"stream": True, "json_schema": True}, {"stream": False}, {"json_schema": False}], {"model": "m"}),
    ],
)
def test_a_rule_after_several_that_together_match_all_its_requests(
    earlier: list[dict[str, Any]], later: dict[str, Any]
):
    (line,) = shadowed(*earlier, later)
    assert line.startswith(f"cohorts[{len(earlier)}]")
    assert "together match every request" in line
    for place in range(len(earlier)):
        one_less = earlier[:place] + earlier[place + 1 :]
        assert shadowed(*one_less, later) == []


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({"metadata.team": "*"}, {"stream": True}),
        ({"tenant": "?"}, {"tenant": "*"}),
        ({"tenant": "[ab]*"}, {"tenant": "[abc]*"}),
        ({"temperature": [0.2, 1]}, {"temperature": [0.3, None]}),
        ({"temperature": [0.2, None]}, {"prompt_tokens": [1, 5]}),
        ({"stream": False}, {"stream": True}),
        ({"tenant": "a", "stream": True}, {"tenant": "a"}),
    ],
)
def test_a_rule_that_something_is_left_for(first: dict[str, Any], later: dict[str, Any]):
    assert shadowed(first, later) == []


@pytest.mark.parametrize(
    "match",
    [
        {"temperature": [0.5, 0.5]},
        {"prompt_tokens": [None, 1]},
        {"prompt_tokens": [3.2, 3.8]},
        {"temperature": [None, 0]},
        {"model": ""},
    ],
)
def test_a_rule_that_contradicts_itself_is_an_error(match: dict[str, Any]):
    service = {"classes": {"fast": {"slo": "batch", "match": match}}, "shares": {"*": 1, "a*": 2}}
    lines = found({}, match, service=service, latency={"limit": {"tpot_ms": 5, "match": match}})
    places = [line.split(" can never match: no request has a ")[0] for line in lines.errors]
    assert places == ["cohorts[1] 'c1'", "service.classes.fast", "latency.limit"]
    assert [line.split(" can never")[0] for line in lines.warnings] == ["service.shares.a*"]


@pytest.mark.parametrize(
    ("tenant", "is_known"), [("bank", False), ("bank-*", False), ("ab*", True), ("a" * 32, True), ("", True)]
)
def test_a_tenant_that_is_no_hash_is_a_warning(tenant: str, is_known: bool):
    lines = found({"tenant": tenant}).warnings
    assert (lines == []) == is_known
    assert all("cohorts[0] 'c0' matches no request to a server" in line for line in lines)


def test_a_rollout_for_the_rest_where_there_is_none():
    drafters = {"drafters": {"quick": {"method": "ngram"}}, "rollout": {"pair": ["quick", "other"]}}
    (line,) = found({"stream": True}, {"stream": False}, **drafters).warnings
    assert (
        "rollout[0] can never start: cohorts[0] 'c0' and cohorts[1] 'c1' together match every request" in line
    )
    assert found({"stream": True}, **drafters).warnings == []


def test_rules_that_split_each_other_many_times_are_not_followed_for_ever():
    matches = [{f"metadata.k{n}": ["a", "b"], "prompt_tokens": [2 * n + 1, 2 * n + 2]} for n in range(60)]
    assert found(*matches, {"metadata.x": "y"}).warnings == []


@pytest.mark.parametrize("bound", [float("inf"), float("nan"), 10**400])
def test_a_bound_that_is_no_finite_number_is_refused(bound: float):
    with pytest.raises(RequestError, match="must be \\[LEAST, BELOW\\]"):
        found({"temperature": [0, bound]})


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path):
    path = tmp_path / "policy.json"
    path.write_text('{"version": 1, "cohorts": [{"name": "a", "match": {"stream": true, "stream": false}}]}')
    with pytest.raises(RequestError, match="has 'stream' twice in one object"):
        read_policy(path)
    path.write_text(json.dumps({"version": 1}))
    assert read_policy(path).cohorts == ()
