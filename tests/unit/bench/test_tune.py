"""What measurements speak for."""

import json
from pathlib import Path

import pytest

from foreword.bench.drafters.summary import recommend, summarise
from foreword.bench.methods import Method
from foreword.cli.policy import _require_own
from foreword.control.policy_file.matching import RequestTraits
from foreword.control.policy_file.parsing import parse_policy
from foreword.errors import RequestError
from helpers.bench_runs import record

METHODS = [Method("head", {"method": "eagle3"}), Method("ngram k=2", {"method": "ngram"}), Method("slow", {})]


def policy(*records: object) -> dict:
    return recommend(summarise(list(records)), METHODS, {"model": "m"})  # type: ignore[arg-type]


def test_every_kind_of_work_gets_those_that_are_worth_trying_the_best_first():
    found = policy(
        record("head", "1", "chat", seconds=4.0),
        record("ngram k=2", "1", "chat", seconds=3.0),
        record("slow", "1", "chat", seconds=9.0),
        record("head", "2", "code", seconds=2.0),
        record("ngram k=2", "2", "code", seconds=7.0),
        record("slow", "2", "code", seconds=9.0),
    )
    assert [(rule["name"], rule.get("drafters")) for rule in found["cohorts"]] == [
        ("chat", ["ngram-k-2", "head"]),
        ("code", ["head"]),
        ("rest", ["head", "ngram-k-2"]),
    ]
    assert list(found["drafters"]) == ["head", "ngram-k-2"]
    assert found["notes"]["speedup_over_plain"]["head"]["code"] == 3.0
    parse_policy(found)


def test_where_nothing_pays_nobody_guesses_and_who_changes_texts_is_left_out():
    found = policy(record("slow", "1", "chat", seconds=9.0), record("head", "1", "chat", token_ids=(9, 9, 9)))
    assert [(rule["name"], rule.get("state")) for rule in found["cohorts"]] == [
        ("chat", "off"),
        ("rest", "off"),
    ]
    assert "1 of 1 texts" in found["notes"]["left_out"]["head"]
    parse_policy(found)


def test_whatever_kinds_of_work_are_called_the_file_can_be_read():
    kinds = ["other", "rest", "a/b", "a-b", "x*", "/"]
    found = policy(*(record("head", str(place), kind, seconds=2.0) for place, kind in enumerate(kinds)))
    parsed = parse_policy(found)
    for kind, rule in zip(kinds, found["cohorts"], strict=False):
        assert parsed.cohort(RequestTraits(metadata={"task": kind})).name == rule["name"]
    assert parsed.cohort(RequestTraits(metadata={"task": "xy"})).name == "rest"


def test_what_tune_has_not_written_is_not_replaced(tmp_path: Path):
    path = tmp_path / "policy.json"
    _require_own(path)
    path.write_text(json.dumps(policy(record("head", "1", "chat"))))
    _require_own(path)
    for text in ("", "[]", '{"notes": 3}', '{"version": 1, "notes": {"by": "me"}}'):
        path.write_text(text)
        with pytest.raises(RequestError, match="was not written by foreword tune; name another file"):
            _require_own(path)
