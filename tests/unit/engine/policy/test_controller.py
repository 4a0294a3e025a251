"""Which cohort a request gets, and what a changed file changes."""

import copy
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.control.service import Slo
from foreword.drafters.config import SpeculationConfig
from foreword.engine.engine import Engine
from foreword.engine.messages import NewRequest, RequestLabels
from foreword.engine.policy import monitor
from foreword.engine.policy.file import WATCH_SECONDS
from foreword.engine.requests.request import Assignment
from foreword.errors import RequestError
from helpers.rollout_world import POLICY, Guesser, RolloutWorld
from helpers.waiting import wait_until

RULES: dict[str, Any] = {
    "version": 1,
    "defaults": {"max_depth": 3},
    "drafters": {
        "small": {"method": "ngram"},
        "large": {"method": "suffix", "num_speculative_tokens": 9},
    },
    "cohorts": [
        {"name": "code", "match": {"metadata.task": "code"}, "drafters": ["small", "large"], "max_depth": 6},
        {"name": "off", "match": {"temperature": [1.0, None]}, "state": "off"},
        {"name": "one", "match": {"priority": "batch"}, "drafters": ["large"]},
    ],
    "latency": {"chat": {"match": {"stream": True}, "tpot_ms": 40}},
    "overload": {"queue": 2, "kv_usage": 0.5, "stop": ["suffix"]},
}


def world(folder: Path, rules: Any = RULES) -> RolloutWorld:
    return RolloutWorld(folder, Guesser, rules)


def assigned(
    of: RolloutWorld, temperature: float = 0.0, speculation: Any = None, **labels: Any
) -> Assignment:
    params = SamplingParams(temperature=temperature)
    new = NewRequest("r", (1, 2, 3), params, speculation=speculation, labels=RequestLabels(**labels))
    return of.policy_file.assign(new)


def test_the_rules_say_who_drafts_and_how_deep(tmp_path: Path):
    found = assigned(world(tmp_path), metadata={"task": "code"})
    assert (found.cohort, found.step_limit) == ("code/greedy", None)
    assert found.plan is not None
    assert (found.plan.method, found.plan.max_nodes, found.plan.max_depth) == ("small+large", 9, 6)
    one = assigned(world(tmp_path), priority="batch", stream=True)
    assert one.plan is not None
    assert (one.plan.method, one.plan.max_depth, one.step_limit) == ("large", 3, 0.04)


def test_a_cohort_that_is_off_decodes_plainly_whatever_is_asked(tmp_path: Path):
    here = world(tmp_path)
    assert assigned(here, 1.0).plan is None
    assert assigned(here, 1.0, {"method": "ngram"}).plan is None
    assert assigned(here, 1.0).cohort == "off/high"


def test_a_request_may_say_no_or_choose(tmp_path: Path):
    here = world(tmp_path)
    assert assigned(here, speculation=False, metadata={"task": "code"}).plan is None
    chosen = assigned(here, speculation={"method": "suffix", "num_speculative_tokens": 9})
    assert chosen.plan is not None
    assert (chosen.plan.method, chosen.plan.max_depth) == ("suffix", 3)


@pytest.mark.parametrize(
    ("wish", "method"),
    [
        ({"method": "remote"}, None),
        ("remote", None),
        ({"num_speculative_tokens": 2}, "ngram"),  # of the engine's own, which asks nodes first
        ({"method": ["remote", "suffix"], "drafters": "127.0.0.1:1"}, "suffix"),
        ({"method": "suffix"}, "suffix"),
    ],
)
def test_a_cohort_whose_drafters_ask_no_nodes_keeps_its_texts_whatever_requests_ask_for(
    tmp_path: Path, wish: Any, method: str | None
):
    here = world(tmp_path)
    own = {"method": ["remote", "ngram"], "drafters": "127.0.0.1:1", "prompt_lookup_max": 3}
    here.core.drafters.set_default(SpeculationConfig.parse(own))
    found = assigned(here, speculation=wish, metadata={"task": "code"}).plan
    assert (None if found is None else found.method) == method
    if wish == {"num_speculative_tokens": 2}:
        assert found is not None
        assert found.max_nodes == 2
    elsewhere = assigned(here, speculation=wish).plan  # no rule names drafters for these
    assert elsewhere is not None
    assert ("remote" in elsewhere.method) == (wish != {"method": "suffix"})


def test_when_the_engine_is_full_the_named_drafters_rest(tmp_path: Path):
    here = world(tmp_path)
    plan = assigned(here, metadata={"task": "code"}).plan
    assert plan is not None
    small, large = plan.gates["small"], plan.gates["large"]
    here.policy_file.between_steps(2, 0.6, here.core.speculation_monitor.totals)
    assert (small.is_open, large.is_open, large.may_observe) == (True, False, False)
    here.policy_file.between_steps(1, 0.6, here.core.speculation_monitor.totals)
    assert large.is_open


def test_who_is_rolled_out_comes_beside_the_engines_own(tmp_path: Path):
    rules = {
        **POLICY,
        "cohorts": [{"name": "code"}],
        "rollout": {"pair": ["fresh", "code"], "steps": [50, 100]},
    }
    here = world(tmp_path, rules)
    here.core.drafters.set_default(SpeculationConfig.parse({"method": "suffix"}))
    shadow = assigned(here).plan
    assert shadow is not None
    assert shadow.method == "suffix+fresh"
    assert not shadow.gates["fresh"].is_open
    here.policy_file.set_stage("fresh", "code", "canary")
    arms = [here.policy_file.assign(NewRequest(str(number), (1, 2, 3))) for number in range(100)]
    for arm in arms:
        (place,) = arm.arms
        assert arm.plan is not None
        assert arm.plan.method == ("suffix+fresh" if place.is_canary else "suffix")
    assert 25 < sum(arm.arms[0].is_canary for arm in arms) < 75


def test_users_cannot_make_ever_more_cohorts(tmp_path: Path):
    rules = {**RULES, "split": ["priority"], "max_cohorts": 6}
    here = world(tmp_path, rules)
    labels = {assigned(here, metadata={"task": "code"}, priority=f"p{number}").cohort for number in range(50)}
    assert len(labels) == 6
    assert "other" in labels


def rewrite(here: RolloutWorld, rules: Any) -> None:
    text = rules if isinstance(rules, str) else json.dumps(rules)
    here.path.write_text(text, encoding="utf-8")
    before = here.path.stat()
    os.utime(here.path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    here.clock.pass_by(2.0)


def test_a_changed_file_is_used_without_a_restart(tmp_path: Path):
    here = world(tmp_path)
    changed = copy.deepcopy(RULES)
    changed["cohorts"][0]["state"] = "off"
    changed["drafters"]["third"] = {"method": "rest", "datastore": "x"}
    changed["cohorts"][2]["drafters"] = ["third"]
    rewrite(here, changed)
    assert assigned(here, metadata={"task": "code"}).plan is None
    third = assigned(here, priority="batch").plan
    assert third is not None
    assert third.method == "third"


def test_an_idle_engine_reads_a_changed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(monitor, "WATCH_SECONDS", 0.01)
    here = world(tmp_path)
    engine = Engine(here.core)
    try:
        changed = copy.deepcopy(RULES)
        changed["cohorts"][0]["state"] = "off"
        rewrite(here, changed)
        wait_until(lambda: here.policy_file.document.cohorts[0].state == "off")  # no request comes
    finally:
        engine.close()


def test_an_engine_without_a_policy_file_sleeps_until_there_is_work(tmp_path: Path):
    here = world(tmp_path)
    assert here.core.speculation_monitor.idle_seconds == WATCH_SECONDS
    here.core.speculation_monitor._policy_file = None
    assert here.core.speculation_monitor.idle_seconds is None


@pytest.mark.parametrize(
    "broken", ["{", {**RULES, "cohort": []}, {**RULES, "drafters": {"small": {"method": "nothing"}}}]
)
def test_a_file_that_is_broken_leaves_the_old_one_with_one_line(
    tmp_path: Path, broken: Any, caplog: pytest.LogCaptureFixture
):
    here = world(tmp_path)
    with caplog.at_level(logging.WARNING):
        rewrite(here, broken)
        for _ in range(5):
            here.clock.pass_by(2.0)
            assert assigned(here, metadata={"task": "code"}).plan is not None
    assert len(caplog.records) == 1
    assert "the old one stays" in caplog.text


def test_a_roll_out_goes_on_when_the_file_changes(tmp_path: Path):
    here = world(tmp_path, POLICY)
    here.policy_file.set_stage("fresh", "code", "verify")
    changed = copy.deepcopy(POLICY)
    changed["rollout"]["verify_samples"] = 77
    rewrite(here, changed)
    assigned(here)
    assert (here.pair.stage, here.pair.rule.verify_samples) == ("verify", 77)
    changed["rollout"]["salt"] = "again"
    rewrite(here, changed)
    assigned(here)
    assert here.pair.stage == "shadow"


def test_a_pair_made_by_hand_outlives_its_drafter_without_harm(tmp_path: Path):
    here = world(tmp_path)
    here.policy_file.set_stage("small", "one", "on")
    changed = copy.deepcopy(RULES)
    del changed["drafters"]["small"]
    changed["cohorts"][0]["drafters"] = ["large"]
    rewrite(here, changed)
    plan = assigned(here, priority="batch").plan
    assert plan is not None
    assert plan.method == "large"


def test_pairs_that_the_file_does_not_know_cannot_be_moved(tmp_path: Path):
    here = world(tmp_path)
    for names in (("small", "nowhere", "on"), ("nobody", "code", "on"), ("small", "code", "sideways")):
        with pytest.raises(RequestError):
            here.policy_file.set_stage(*names)


def test_the_rules_say_how_soon_a_request_is_served(tmp_path: Path):
    service = {"classes": {"chat": {"slo": "latency", "tpot_ms": 30, "match": {"stream": True}}}}
    here = world(tmp_path, RULES | {"service": service})
    chat = assigned(here, stream=True)
    assert (chat.service.name, chat.service.slo, chat.service.step_seconds) == ("chat", Slo.LATENCY, 0.03)
    assert chat.step_limit == 0.03  # the tighter of the two
    assert assigned(here).service.name == "throughput"
