"""What a server tells about guessing, and how operators move it."""

import json
from pathlib import Path

import pytest

from foreword.cli.watch import fetch_report
from foreword.control.reporting.figures import Bounds, ControlReport, PairReport, Usage
from foreword.errors import RequestError
from foreword.server.settings import ServerSettings
from helpers.fake_engine import FakeEngine
from helpers.local_server import local_server

REPORT = ControlReport(
    pairs=(
        PairReport(
            "head",
            "code/greedy",
            state="canary",
            percent=5.0,
            in_use=True,
            reason="gains",
            predicted=Bounds(1.1, 1.2, 1.3),
            measured=Bounds(1.0, 1.1, 1.2),
            depth=4,
            kept=3,
            depths=(0, 1, 2),
            acceptance_by_level=(0.8, 0.7),
            coverage=0.9,
            asks=100,
            break_even=0.4,
            switched=2,
        ),
        PairReport("ngram", "chat", state="held", reason="gain: 0.9", asks=5),
    ),
    probe_seconds=1.0,
    provisional_pages=3,
    kv_pages=100,
    mismatches=1,
    usage=Usage(100.0, 10.0, 50.0, 1000, 1.0, 3.0),
)
POLICY = {
    "version": 1,
    "drafters": {"head": {"method": "ngram"}},
    "cohorts": [{"name": "code", "match": {}, "drafters": ["head"]}],
}


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("policy") / "policy.json"
    path.write_text(json.dumps(POLICY), encoding="utf-8")
    engine = FakeEngine()
    engine.control = REPORT
    settings = ServerSettings("tiny", allow_switch=True, policy_file=str(path))
    with local_server(tiny_model, settings, engine) as running:
        yield running


def test_the_report_is_the_engines(server):
    assert fetch_report(server.url, None) == REPORT
    assert fetch_report(f"{server.url}/v1/", None) == REPORT  # as clients of the API have it
    with server.http() as http:
        told = http.get("/speculation").json()
        assert told["usage"]["target_utilisation"] == 0.5
        assert told["pairs"][0]["measured"] == {"low": 1.0, "mean": 1.1, "high": 1.2}
        assert http.get("/health").json()["usage"]["cost_per_million_busy"] == pytest.approx(160 / 3.6)


def test_advice_is_given_over_http(server):
    with server.http() as http:
        (advice,) = http.get("/advise").json()["advice"]
    assert (advice["mode"], advice["drafter"]) == ("held", "ngram")


def test_the_report_becomes_metrics(server):
    with server.http() as http:
        page = http.get("/metrics").text
    pair = 'cohort="code/greedy",drafter="head",model_name="tiny"'
    for line in (
        f'foreword:spec_decode_state{{{pair},state="canary"}} 1.0',
        f'foreword:spec_decode_state{{{pair},state="on"}} 0.0',
        f"foreword:spec_decode_predicted_gain{{{pair}}} 1.2",
        f"foreword:spec_decode_break_even_acceptance{{{pair}}} 0.4",
        f"foreword:spec_decode_asks_total{{{pair}}} 100.0",
        f"foreword:spec_decode_empty_drafts_total{{{pair}}} 97.0",
        f"foreword:spec_decode_decisions_total{{{pair}}} 2.0",
        'foreword:spec_decode_mismatches{model_name="tiny"} 1.0',
        'foreword:spec_decode_provisional_pages{model_name="tiny"} 3.0',
        'foreword:device_busy_seconds_total{model_name="tiny",role="target"} 50.0',
        'foreword:device_utilisation{model_name="tiny",role="draft"} 0.1',
    ):
        assert line in page


def test_an_operator_moves_one_pair_of_the_file(server):
    with server.http() as http:
        move = {"drafter": "head", "cohort": "code", "state": "off"}
        assert http.post("/speculation", json=move).json() == move
        assert server.engine.moved == [("head", "code", "off")]
        for wrong in (
            {"drafter": "tail"},
            {"cohort": "prose"},
            {"state": "sideways"},
            {"state": None},
            {"enabled": True},
        ):
            assert http.post("/speculation", json=move | wrong).status_code == 400, wrong
        assert http.post("/speculation", json={}).status_code == 400
    assert len(server.engine.moved) == 1


def test_what_rules_look_at_reaches_the_engine(server):
    body = {"max_tokens": 1, "metadata": {"task": "code"}, "priority": "batch"}
    with server.http() as http:
        http.post("/generate", json=body | {"prompt": "x"})
        http.post("/v1/completions", json=body | {"prompt": "x", "stream": True})
        http.post("/v1/chat/completions", json=body | {"messages": [{"role": "user", "content": "x"}]})
    for request, stream in zip(server.engine.requests[-3:], (False, True, False), strict=True):
        labels = request.labels
        assert (labels.metadata, labels.priority, labels.stream) == ({"task": "code"}, "batch", stream)
        assert labels.model == "tiny"


def test_answers_and_health_tell_the_percentiles_of_accepted_runs(server):
    with server.http() as http:
        told = http.post("/generate", json={"prompt": "x", "max_tokens": 30}).json()["speculation"]
        assert 0 <= told["accepted_run_p50"] <= told["accepted_run_p90"] <= 2
        assert http.get("/health").json()["speculation"]["accepted_run_p90"] == 1


def test_a_server_that_cannot_be_asked_is_told_in_one_line(server):
    with pytest.raises(RequestError, match="cannot be reached"):
        fetch_report("http://127.0.0.1:1", None)
    with pytest.raises(RequestError, match="must be an http address"):
        fetch_report("ftp://x", None)
    with pytest.raises(RequestError, match="answers 404"):
        fetch_report(f"{server.url}/v2", None)
