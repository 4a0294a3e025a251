"""`foreword learn` as a user runs it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foreword.cli.main import app
from foreword.server.settings import ServerSettings, tenant_of
from helpers.command_line import assert_one_line_error, foreword, refusal
from helpers.fake_engine import FakeEngine
from helpers.learning_reports import TRAINED
from helpers.local_server import local_server


@pytest.fixture(scope="module")
def server(tiny_model: Path):
    engine = FakeEngine()
    engine.learning = TRAINED
    settings = ServerSettings("tiny", api_keys=("mine",), admin_keys=("root",))
    with local_server(tiny_model, settings, engine) as running:
        yield running


@pytest.fixture
def no_keys(monkeypatch):
    for name in ("FOREWORD_API_KEY", "FOREWORD_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_status_shows_the_versions(server):
    run = foreword("learn", "status", "--url", server.url, "--api-key", "mine")
    assert run.returncode == 0, run.stderr
    assert "learning: rolling out; 1,500 of 20,000 new tokens" in run.stdout
    assert "3 trainings, 1 failed; 90 s, 2 s of them while requests were running" in run.stdout
    rows = [line.split() for line in run.stdout.splitlines() if line.split()[:1] in (["1"], ["2"])]
    assert [(row[0], row[1], *row[-2:]) for row in rows] == [
        ("1", "on", "1.50", "1.80"),
        ("2", "canary", "1.80", "2.10"),
    ]
    assert "version 2: 10% of requests" in run.stdout
    run = foreword("learn", "status", "--url", server.url, "--api-key", "mine", "--json")
    assert json.loads(run.stdout)["versions"][1]["tau_after"] == 2.1
    top = foreword("top", "--url", server.url, "--api-key", "mine", "--json")
    assert json.loads(top.stdout)["learning"]["version"] == 1


@pytest.mark.usefixtures("no_keys")
def test_rollback_needs_an_admin_key(server):
    refused = refusal("learn", "rollback", "--url", server.url, "--api-key", "mine")
    assert_one_line_error(refused, "answers 403", "--admin-key")
    assert not server.engine.learned
    run = foreword("learn", "rollback", "--url", server.url, "--admin-key", "root", "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {"action": "rollback"}
    assert server.engine.learned.pop() == ("rollback", "")


def test_me_is_the_tenant_of_the_api_key_also_where_an_admin_key_is_set(server):
    keys = {"FOREWORD_API_KEY": "mine", "FOREWORD_ADMIN_KEY": "root"}
    for tenant, forgotten in (("me", tenant_of("mine")), (tenant_of("x"), tenant_of("x")), ("none", "")):
        run = CliRunner().invoke(app, ["learn", "forget", tenant, "--url", server.url], env=keys)
        assert run.exit_code == 0, run.output
        assert server.engine.learned.pop() == ("forget", forgotten)


@pytest.mark.usefixtures("no_keys")
def test_what_the_server_refuses_is_one_line(server):
    url = ("--url", server.url)
    assert_one_line_error(refusal("learn", "status", *url), "answers 401", "--api-key")
    wrong = refusal("learn", "forget", "a/b", *url, "--admin-key", "root")
    assert_one_line_error(wrong, "answers 404")
    wrong = refusal("learn", "forget", "someone", *url, "--admin-key", "root")
    assert_one_line_error(wrong, "answers 400: a tenant is me, none, or 32 digits")
    assert_one_line_error(refusal("learn", "status", "--url", "http://127.0.0.1:1"), "cannot be reached")
    assert not server.engine.learned
