"""Rules that no request can come to are told by name; rules that one can come to are not."""

import json
from pathlib import Path
from typing import Any

import pytest

from foreword.control.policy_file.parsing import parse_policy, read_policy
from foreword.control.policy_file.unreachable import unreachable
from foreword.errors import RequestError


def told(*matches: dict[str, Any], **more: Any) -> list[str]:
    cohorts = [{"name": f"c{place}", "match": match} for place, match in enumerate(matches)]
    return unreachable(parse_policy({"version": 1, "cohorts": cohorts, **more}))


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
def test_a_rule_behind_one_that_takes_all_it_is_for(first: dict[str, Any], later: dict[str, Any]):
    (line,) = told({"model": "z"}, first, later)
    assert line == "cohort c2 can never fit: all that it is for is taken by cohort c1, which stands before it"
    assert told(later, first) == []


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
    assert told(first, later) == []


@pytest.mark.parametrize("match", [{"temperature": [0.5, 0.5]}, {"prompt_tokens": [None, 0]}])
def test_a_rule_that_contradicts_itself(match: dict[str, Any]):
    service = {"classes": {"fast": {"slo": "batch", "match": match}}, "shares": {"*": 1, "a": 2}}
    latency = {"limit": {"tpot_ms": 5, "match": match}}
    lines = told(match, service=service, latency=latency)
    begins = [line.split(" can never fit")[0] for line in lines]
    assert begins == ["cohort c0", "service class fast", "share of a", "latency rule limit"]


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path):
    path = tmp_path / "policy.json"
    path.write_text('{"version": 1, "cohorts": [{"name": "a", "match": {"stream": true, "stream": false}}]}')
    with pytest.raises(RequestError, match="has 'stream' twice in one object"):
        read_policy(path)
    path.write_text(json.dumps({"version": 1}))
    assert read_policy(path).cohorts == ()
