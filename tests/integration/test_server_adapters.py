"""Adapters, priorities and deadlines over HTTP."""

from pathlib import Path

import pytest

from foreword.cli.options.serve import named_paths
from foreword.errors import RequestError
from foreword.server.settings import ServerSettings
from helpers.fake_engine import FakeEngine
from helpers.local_server import LocalServer, local_server

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def server(tiny_model: Path):
    settings = ServerSettings("tiny", adapters={"sql": "/adapters/sql"}, allow_adapter_loading=True)
    with local_server(tiny_model, settings, FakeEngine()) as running:
        yield running


def test_the_model_of_a_request_chooses_its_adapter(server: LocalServer):
    for model, adapter in ((None, ""), ("tiny", ""), ("sql", "sql")):
        answer = server.http().post("/v1/chat/completions", json={**CHAT, "model": model}).json()
        assert answer["model"] == (model or "tiny")
        asked = server.engine.requests[-1]
        assert (asked.adapter, asked.labels.adapter, asked.labels.model) == (adapter, adapter, "tiny")
    stream = server.openai().completions.create(model="sql", prompt="a", max_tokens=3, stream=True)
    assert {chunk.model for chunk in stream} == {"sql"}
    assert server.engine.requests[-1].adapter == "sql"
    server.http().post("/generate", json={"prompt": "a", "max_tokens": 2, "model": "sql"}).raise_for_status()
    assert server.engine.requests[-1].adapter == "sql"


def test_adapters_are_listed_with_their_parent_and_come_and_go(server: LocalServer):
    http = server.http()

    def listed() -> dict[str, str | None]:
        return {model["id"]: model["parent"] for model in http.get("/v1/models").json()["data"]}

    assert listed() == {"tiny": None, "sql": "tiny"}
    loaded = http.post("/v1/load_lora_adapter", json={"lora_name": "code", "lora_path": "/adapters/code"})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'code' added successfully.")
    assert listed() == {"tiny": None, "code": "tiny", "sql": "tiny"}
    assert http.get("/v1/models/code").json()["parent"] == "tiny"
    assert http.post("/v1/chat/completions", json={**CHAT, "model": "code"}).status_code == 200
    again = http.post("/v1/load_lora_adapter", json={"lora_name": "code", "lora_path": "/adapters/code"})
    assert again.json()["error"]["message"] == "there is a model 'code' already"
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "code"}).status_code == 200
    gone = http.post("/v1/chat/completions", json={**CHAT, "model": "code"})
    assert gone.status_code == 404
    assert gone.json()["error"]["message"] == "there is no model 'code' here; this server has 'tiny', 'sql'"
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "code"}).status_code == 404
    bad = http.post("/v1/load_lora_adapter", json={"lora_name": "new", "lora_path": "/bad"})
    assert (bad.status_code, bad.json()["error"]["message"]) == (400, "/bad is no folder")
    assert listed() == {"tiny": None, "sql": "tiny"}


def test_nobody_loads_adapters_unless_the_operator_says_so(tiny_model: Path):
    with local_server(tiny_model, ServerSettings("tiny"), FakeEngine()) as server:
        body = {"lora_name": "code", "lora_path": "/adapters/code"}
        refused = server.http().post("/v1/load_lora_adapter", json=body)
        assert refused.status_code == 403
        assert "--allow-lora-loading" in refused.json()["error"]["message"]
        assert not server.engine.adapters.loaded


def test_priority_and_deadline_reach_the_engine(server: LocalServer):
    body = {**CHAT, "priority": -3, "deadline_ms": 5000, "on_deadline": "refuse"}
    server.http().post("/v1/chat/completions", json=body).raise_for_status()
    asked = server.engine.requests[-1]
    assert (asked.priority, asked.deadline_ms, asked.on_deadline) == (-3, 5000, "refuse")
    assert asked.labels.priority == "-3"
    server.http().post("/v1/chat/completions", json={**CHAT, "priority": "gold"}).raise_for_status()
    asked = server.engine.requests[-1]
    assert (asked.priority, asked.labels.priority, asked.deadline_ms) == (0, "gold", None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 1.5),
        ("priority", 2**40),
        ("deadline_ms", 0),
        ("deadline_ms", "soon"),
        ("on_deadline", "now"),
    ],
)
def test_nonsense_is_refused_by_the_field_s_name(server: LocalServer, field: str, value: object):
    refused = server.http().post("/v1/chat/completions", json={**CHAT, field: value})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith(field)


def test_an_answer_without_tokens_at_its_deadline_is_an_error_and_a_part_is_an_answer(server: LocalServer):
    late = server.http().post("/v1/chat/completions", json={**CHAT, "deadline_ms": 5})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    part = (
        server.http().post("/v1/chat/completions", json={**CHAT, "max_tokens": 40, "deadline_ms": 30}).json()
    )
    assert part["choices"][0]["finish_reason"] == "deadline"
    assert 3 <= part["usage"]["completion_tokens"] < 40


def test_metrics_tell_how_each_class_fares(server: LocalServer):
    server.http().post("/v1/chat/completions", json=CHAT).raise_for_status()
    page = server.http().get("/metrics").text
    assert 'foreword:service_requests_total{finished_reason="length",model_name="tiny",service=""}' in page
    assert "foreword:service_time_per_output_token_seconds_bucket" in page


def test_named_folders_are_checked_before_anything_is_loaded(tmp_path: Path):
    folder = tmp_path / "a"
    folder.mkdir()
    assert named_paths("--lora-modules", [f"sql={folder}"], "tiny") == {"sql": str(folder)}
    for given, complaint in (
        ([str(folder)], "takes NAME=PATH"),
        ([f"sql={tmp_path / 'nowhere'}"], "is not a directory"),
        ([f"tiny={folder}"], "there is a model 'tiny' already"),
        ([f"a={folder}", f"a={folder}"], "there is a model 'a' already"),
    ):
        with pytest.raises(RequestError, match=complaint):
            named_paths("--lora-modules", given, "tiny")
