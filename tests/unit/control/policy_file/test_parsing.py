"""What a policy file may say, and how it is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from foreword.control.policy_file.document import OTHER
from foreword.control.policy_file.matching import RequestTraits
from foreword.control.policy_file.parsing import parse_policy, read_policy
from foreword.errors import RequestError

WHOLE: dict[str, Any] = {
    "version": 1,
    "defaults": {
        "state": "on",
        "max_depth": 8,
        "margin_on": 1.03,
        "margin_off": 1.01,
        "probe_share": 0.02,
        "reference_share": 0.03,
        "max_draft_share": 0.5,
    },
    "drafters": {
        "ngram": {"method": "ngram"},
        "head": {"method": "eagle3", "model": "x", "price_per_hour": 2.0},
    },
    "cohorts": [
        {"name": "code", "match": {"tenant": "*", "metadata.task": "code"}, "drafters": ["head", "ngram"]},
        {"name": "extract", "match": {"json_schema": True}, "drafters": ["ngram"], "max_depth": 16},
        {"name": "long", "match": {"prompt_tokens": [4096, None]}},
        {"name": "creative", "match": {"temperature": [0.9, None]}, "state": "off"},
    ],
    "split": ["temperature_band", "adapter"],
    "max_cohorts": 32,
    "rollout": {
        "pair": ["head", "code"],
        "start": "shadow",
        "promote": "auto",
        "salt": "2026-11",
        "steps": [1, 5, 25, 100],
        "min_requests": 200,
        "min_passes": 20000,
        "verify_samples": 200,
        "guards": {"gain": 0.99, "tpot_p95": 1.05, "memory_bytes": 1e9},
    },
    "latency": {"interactive": {"match": {"stream": True}, "tpot_ms": 50}},
    "overload": {"queue": 1, "kv_usage": 0.9, "stop": ["draft_model"]},
    "prices": {"target": 3.0, "draft": 1.0},
    "state_file": "speculation-state.json",
}


def changed(*path: str | int, to: Any) -> dict[str, Any]:
    value = copy.deepcopy(WHOLE)
    inner: Any = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return value


def test_all_that_a_file_can_say_is_read():
    policy = parse_policy(WHOLE)
    assert [rule.name for rule in policy.cohorts] == ["code", "extract", "long", "creative"]
    assert policy.drafters["head"].config == {"method": "eagle3", "model": "x"}
    assert policy.drafters["head"].price_per_hour == 2.0
    assert policy.settings.margin_on == pytest.approx(0.03)
    assert policy.settings.margin_off == pytest.approx(0.01)
    assert (policy.settings.probe_share, policy.settings.reference_share) == (0.02, 0.03)
    assert policy.rollouts[0].steps == (1, 5, 25, 100)
    assert policy.rollouts[0].guards.memory_bytes == 1e9
    assert policy.step_limit(RequestTraits(stream=True)) == 0.05
    assert policy.step_limit(RequestTraits()) is None
    assert policy.prices is not None
    assert policy.prices.target == 3.0


@pytest.mark.parametrize(
    ("traits", "cohort"),
    [
        (
            RequestTraits(metadata={"task": "code"}, json_schema=True),
            "code",
        ),  # the first that fits, not the best
        (RequestTraits(json_schema=True, temperature=1.5), "extract"),
        (RequestTraits(prompt_tokens=4096), "long"),
        (RequestTraits(prompt_tokens=4095), OTHER),
        (RequestTraits(temperature=0.9), "creative"),
        (RequestTraits(metadata={"task": "prose"}), OTHER),
    ],
)
def test_the_first_rule_that_fits_wins(traits: RequestTraits, cohort: str):
    assert parse_policy(WHOLE).cohort(traits).name == cohort


def test_a_cohort_is_counted_apart_by_what_the_file_splits_by():
    policy = parse_policy(WHOLE)
    rule = policy.cohort(RequestTraits(metadata={"task": "code"}))
    assert policy.label(rule, RequestTraits()) == "code/greedy"
    assert policy.label(rule, RequestTraits(temperature=0.7, adapter="fr")) == "code/medium/fr"


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (changed("version", to=2), "version must be 1"),
        (changed("defaults", "max_depth", to=65), "max_depth must be"),
        (changed("cohorts", 1, "max_depth", to=65), "cohorts[1].max_depth must be"),
        (changed("cohort", to=[]), "unknown key 'cohort'"),
        (changed("defaults", "depth", to=3), "defaults has an unknown key 'depth'"),
        (changed("defaults", "state", to="maybe"), "defaults.state must be one of on, off"),
        (changed("cohorts", 0, "matches", to={}), "cohorts[0] has an unknown key 'matches'"),
        (changed("cohorts", 0, "match", "tenent", to="x"), "unknown key 'tenent'"),
        (changed("cohorts", 2, "match", "prompt_tokens", to=5), "prompt_tokens must be [LEAST, BELOW]"),
        (changed("cohorts", 1, "match", "json_schema", to="yes"), "json_schema must be true or false"),
        (changed("cohorts", 0, "match", "tenant", to=[]), "tenant must be a text"),
        (changed("cohorts", 0, "drafters", to=["tail"]), "cohorts[0].drafters names an unknown 'tail'"),
        (changed("cohorts", 0, "name", to="other"), "cohorts[0].name must be a name"),
        (changed("cohorts", 1, "name", to="code"), "two of them have the same name"),
        (changed("rollout", "pair", to=["head", "none"]), "rollout[0].pair must be"),
        (changed("rollout", "steps", to=[5, 1]), "rollout[0].steps must be rising"),
        (changed("rollout", "guards", "tpot", to=1), "rollout[0].guards has an unknown key 'tpot'"),
        (changed("latency", "interactive", to={}), "latency.interactive.tpot_ms must be"),
        (changed("prices", to={}), "prices.target is missing"),
        (changed("overload", "kv_usage", to=2), "overload.kv_usage must be a number"),
        (changed("max_cohorts", to=3), "max_cohorts allows 2"),
        (changed("split", to=["mood"]), "names an unknown 'mood'"),
        ([], "the policy must be an object"),
    ],
)
def test_what_is_wrong_is_refused_by_name(value: Any, complaint: str):
    with pytest.raises(RequestError) as refusal:
        parse_policy(value)
    assert complaint in str(refusal.value)


def test_a_file_that_is_none_is_refused_in_one_line(tmp_path: Path):
    path = tmp_path / "policy.json"
    with pytest.raises(RequestError, match="cannot be read"):
        read_policy(path)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(RequestError, match="is not JSON"):
        read_policy(path)
    path.write_text(json.dumps(WHOLE), encoding="utf-8")
    assert read_policy(path).max_cohorts == 32


def test_a_policy_is_not_the_file_of_its_own_state(tmp_path: Path):
    path = tmp_path / "policy.json"
    for name in ("policy.json", "./policy.json", str(path)):
        path.write_text(json.dumps({"version": 1, "state_file": name}))
        with pytest.raises(RequestError, match="state_file is this file itself"):
            read_policy(path)
    path.write_text(json.dumps({"version": 1, "state_file": "state.json"}))
    assert read_policy(path).state_file == "state.json"
