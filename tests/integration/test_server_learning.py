"""The routes of a head that is trained on the traffic: who may read, roll back and delete."""

from dataclasses import asdict
from pathlib import Path

import pytest

from foreword.cli.learn import fetch_learning
from foreword.cli.server_client import ServerRefusal
from foreword.engine.learning import LearningReport
from foreword.server.settings import ServerSettings, tenant_of
from helpers.fake_engine import FakeEngine
from helpers.learning_reports import TRAINED
from helpers.local_server import local_server

OTHER = tenant_of("other")
ROLLBACK = {"action": "rollback"}


def learning_engine(report: LearningReport | None = TRAINED) -> FakeEngine:
    engine = FakeEngine()
    engine.learning = report
    return engine


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def server(tiny_model: Path):
    with local_server(tiny_model, ServerSettings("tiny"), learning_engine()) as running:
        yield running


@pytest.fixture(scope="module")
def keyed(tiny_model: Path):
    """A server with two tenants and an admin."""
    settings = ServerSettings("tiny", api_keys=("mine", "other"), admin_keys=("root",))
    with local_server(tiny_model, settings, learning_engine()) as running:
        yield running


def test_the_report_is_the_engines(server):
    assert fetch_learning(server.url, None) == TRAINED
    with server.http() as http:
        assert http.get("/learn").json() == {**asdict(TRAINED), "versions": [*map(asdict, TRAINED.versions)]}
        health = http.get("/health").json()["learning"]
    assert health == {name: getattr(TRAINED, name) for name in health}
    assert {"state", "reason", "version", "new_tokens"} <= set(health)


def test_a_report_of_a_later_version_is_read(server, monkeypatch):
    later = {
        **asdict(TRAINED),
        "speed": 3,
        "versions": [asdict(one) | {"notes": ""} for one in TRAINED.versions],
    }
    monkeypatch.setattr("foreword.cli.learn.call_server", lambda *_, **__: later)
    assert fetch_learning(server.url, None) == TRAINED


def test_without_keys_the_only_tenant_operates_it(server):
    with server.http() as http:
        for name in ("me", "none"):
            answer = http.delete(f"/learn/tenants/{name}")
            assert (answer.status_code, answer.json()) == (202, {"action": "forget", "tenant": ""})
        answer = http.post("/learn", json=ROLLBACK)
        assert (answer.status_code, answer.json()) == (202, ROLLBACK)
        assert http.delete(f"/learn/tenants/{OTHER}").status_code == 202  # of an earlier start with keys
    assert server.engine.learned[-4:] == [("forget", ""), ("forget", ""), ("rollback", ""), ("forget", OTHER)]


def test_what_is_not_an_action_or_a_tenant_is_refused(server):
    count = len(server.engine.learned)
    with server.http() as http:
        for body in (
            {},
            {"action": "forget"},
            {"action": "forget", "tenant": OTHER},
            ROLLBACK | {"tenant": ""},
        ):
            assert http.post("/learn", json=body).status_code == 400, body
        for name in ("You", "0" * 31, "0" * 33, "A" * 32, "%2e%2e", f"{OTHER}%0a"):
            assert http.delete(f"/learn/tenants/{name}").status_code == 400, name
        for name in ("", "..%2fx"):
            assert http.delete(f"/learn/tenants/{name}").status_code in (404, 405), name
    assert len(server.engine.learned) == count


def test_a_web_page_of_another_origin_deletes_nothing(server):
    count = len(server.engine.learned)
    with server.http(Origin="https://evil.example") as http:
        assert http.delete("/learn/tenants/me").status_code == 403
        assert http.post("/learn", json=ROLLBACK).status_code == 403
    assert len(server.engine.learned) == count


def test_every_key_reads_and_only_an_admin_rolls_back(keyed):
    with keyed.http() as http:
        assert http.get("/learn").status_code == 401
        assert http.post("/learn", json=ROLLBACK).status_code == 401
        assert http.get("/learn", headers=bearer("mine")).status_code == 200
        refused = http.post("/learn", json=ROLLBACK, headers=bearer("mine"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_required")
        assert not keyed.engine.learned
        assert http.post("/learn", json=ROLLBACK, headers=bearer("root")).status_code == 202
    assert keyed.engine.learned.pop() == ("rollback", "")


@pytest.mark.parametrize(
    ("key", "name", "forgotten"),
    [
        ("mine", "me", tenant_of("mine")),
        ("mine", tenant_of("mine"), tenant_of("mine")),
        ("mine", OTHER, None),
        ("mine", "none", None),
        ("root", OTHER, OTHER),
        ("root", "none", ""),
        ("root", "me", tenant_of("root")),
    ],
)
def test_a_tenant_deletes_its_own_texts_and_an_admin_those_of_all(keyed, key, name, forgotten):
    with keyed.http(**bearer(key)) as http:
        answer = http.delete(f"/learn/tenants/{name}")
    assert answer.status_code == (403 if forgotten is None else 202)
    assert keyed.engine.learned == ([] if forgotten is None else [("forget", forgotten)])
    keyed.engine.learned.clear()


def test_nobody_deletes_without_a_key(keyed):
    with keyed.http() as http:
        for name in ("me", "none", OTHER):
            assert http.delete(f"/learn/tenants/{name}").status_code == 401
    assert not keyed.engine.learned


def test_callers_without_a_key_who_share_a_tenant_need_an_admin(tiny_model):
    settings = ServerSettings("tiny", admin_keys=("root",))
    with local_server(tiny_model, settings, learning_engine()) as server, server.http() as http:
        for name in ("me", "none", tenant_of("root")):
            assert http.delete(f"/learn/tenants/{name}").status_code == 403, name
        assert not server.engine.learned
        assert http.delete("/learn/tenants/none", headers=bearer("root")).status_code == 202
        assert server.engine.learned == [("forget", "")]


def test_a_server_that_does_not_learn_says_so(tiny_model):
    with local_server(tiny_model, ServerSettings("tiny"), learning_engine(None)) as server:
        with server.http() as http:
            for answer in (
                http.get("/learn"),
                http.post("/learn", json=ROLLBACK),
                http.delete("/learn/tenants/me"),
            ):
                assert answer.status_code == 404
                assert "--learn" in answer.json()["error"]["message"]
            assert "learning" not in http.get("/health").json()
        assert not server.engine.learned
        with pytest.raises(ServerRefusal, match="answers 404: it does not train its head"):
            fetch_learning(server.url, None)


def test_figures_can_be_hidden_and_texts_still_be_deleted(tiny_model):
    settings = ServerSettings("tiny", show_speculation=False)
    with local_server(tiny_model, settings, learning_engine()) as server, server.http() as http:
        with pytest.raises(ServerRefusal, match="or hides it"):
            fetch_learning(server.url, None)
        assert "learning" not in http.get("/health").json()
        assert http.delete("/learn/tenants/me").status_code == 202
        assert server.engine.learned == [("forget", "")]


def test_the_report_becomes_metrics(server):
    with server.http() as http:
        page = http.get("/metrics").text
    for line in (
        'learn_state{model_name="tiny",state="rolling out"} 1.0',
        'learn_state{model_name="tiny",state="failed"} 0.0',
        'learn_texts{model_name="tiny"} 12.0',
        'learn_new_tokens{model_name="tiny"} 1500.0',
        'learn_version{model_name="tiny"} 1.0',
        'learn_failures_total{model_name="tiny"} 1.0',
        'learn_train_seconds_total{model_name="tiny"} 90.0',
        'learn_busy_seconds_total{model_name="tiny"} 2.5',
        'learn_tokens_per_pass{head="before",model_name="tiny"} 1.8',
        'learn_tokens_per_pass{head="newest",model_name="tiny"} 2.1',
    ):
        assert f"foreword:{line}\n" in page, line
