"""`foreword policy`, `top`, `advise` and `tune` as a user runs them."""

import json
from pathlib import Path
from typing import Any

import pytest

from foreword.control.policy_file.parsing import read_policy
from foreword.control.reporting.figures import ControlReport, PairReport
from foreword.server.settings import ServerSettings, tenant_of
from helpers.command_line import assert_one_line_error, foreword, refusal
from helpers.fake_engine import FakeEngine
from helpers.local_server import local_server

POLICY: dict[str, Any] = {
    "version": 1,
    "drafters": {"quick": {"method": "ngram"}},
    "cohorts": [{"name": "code", "match": {"metadata.task": "code"}, "drafters": ["quick"]}],
}


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(POLICY), encoding="utf-8")
    return path


def test_check_says_what_is_wrong_by_name(policy: Path):
    run = foreword("policy", "check", str(policy), "--json")
    assert run.returncode == 0, run.stderr
    found = {"ok": True, "cohorts": ["code"], "drafters": ["quick"], "rollouts": []}
    assert json.loads(run.stdout) == found | {"errors": [], "warnings": []}
    behind = [{"name": "all"}, *POLICY["cohorts"]]
    policy.write_text(json.dumps(POLICY | {"cohorts": behind}), encoding="utf-8")
    run = foreword("policy", "check", str(policy))
    assert run.returncode == 0, run.stderr
    assert "warning: cohorts[1] 'code' can never match: cohorts[0] 'all' before it" in run.stdout
    never = [{"name": "never", "match": {"temperature": [1, 1]}}]
    policy.write_text(json.dumps(POLICY | {"cohorts": never}), encoding="utf-8")
    run = foreword("policy", "check", str(policy), "--json")
    assert (run.returncode, json.loads(run.stdout)["ok"]) == (1, False)
    assert "error: cohorts[0] 'never' can never match" in run.stderr
    policy.write_text(json.dumps(POLICY | {"drafters": {"quick": {"method": "ngrams"}}}), encoding="utf-8")
    assert_one_line_error(refusal("policy", "check", str(policy)), "drafters.quick", "'ngrams'")


def test_explain_tells_the_cohort_and_why(policy: Path):
    body = json.dumps({"prompt": [1, 2], "temperature": 0, "metadata": {"task": "code"}})
    run = foreword("policy", "explain", "-", "--policy", str(policy), "--json", stdin=body)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert (told["cohort"], told["label"], list(told["drafters"])) == ("code", "code/greedy", ["quick"])
    assert "metadata.task is code" in run.stderr
    hot = foreword(
        "policy", "explain", "-", "--policy", str(policy), stdin='{"prompt": "x", "temperature": 3}'
    )
    assert_one_line_error(hot, "temperature: must be at most 2")
    named = '{"prompt": "x", "speculation": "eagle3"}'
    run = foreword("policy", "explain", "-", "--policy", str(policy), stdin=named)
    assert_one_line_error(run, "method must be one of grammar, ngram, ")


def test_the_tenant_of_a_key_can_be_asked(policy: Path):
    run = foreword("policy", "tenant", stdin="secret\n")
    assert run.stdout.strip() == tenant_of("secret")


def test_a_server_refuses_a_broken_file_before_it_loads_anything(policy: Path):
    policy.write_text('{"version": 1, "cohort": []}', encoding="utf-8")
    run = foreword("serve", "--speculation-policy", str(policy), "--port", "0")
    assert_one_line_error(run, "unknown key 'cohort'")


def test_top_and_advise_ask_a_server(tiny_model: Path):
    engine = FakeEngine()
    engine.control = ControlReport(pairs=(PairReport("quick", "code", state="held", reason="gain: 0.9"),))
    with local_server(tiny_model, ServerSettings("tiny"), engine) as server:
        once = foreword("top", "--url", server.url, "--once")
        whole = foreword("top", "--url", server.url, "--json")
        advice = foreword("advise", "--url", server.url, "--json")
    assert "quick" in once.stdout
    assert json.loads(whole.stdout)["pairs"][0]["state"] == "held"
    assert json.loads(advice.stdout)["advice"][0]["mode"] == "held"
    assert_one_line_error(refusal("top", "--url", "http://127.0.0.1:1", "--once"), "cannot be reached")


def test_tune_writes_a_policy_that_can_be_used(tiny_model: Path, tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"turns": [f"hello {kind}"], "category": kind} for kind in ("chat", "code")]
    prompts.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    out = tmp_path / "tuned.json"
    run = foreword("tune", "--model", str(tiny_model), "--prompts", str(prompts), "--out", str(out),
                   "--methods", "ngram,suffix", "--max-tokens", "8", "--json")  # fmt: skip
    assert run.returncode == 0, run.stderr
    tuned = read_policy(out)
    assert [rule.name for rule in tuned.cohorts] == ["chat", "code", "rest"]
    assert json.loads(run.stdout)["policy"] == json.loads(out.read_text(encoding="utf-8"))
    assert foreword("policy", "check", str(out)).returncode == 0
