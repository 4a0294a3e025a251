"""`foreword batch`: files of requests, answered without a port."""

import asyncio
import json
from pathlib import Path

import pytest

from foreword.server.app import create_app
from foreword.server.batch import Batch, BatchCounts, answer_all, open_batch
from foreword.server.settings import ServerSettings
from helpers.fake_engine import FakeEngine
from helpers.local_server import local_server
from helpers.real_server import real_server, with_context

MESSAGES = [{"role": "user", "content": "hello"}]


def asked(custom_id: str, url: str = "/v1/chat/completions", **body: object) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "tiny", **body}}


CHAT = {"messages": MESSAGES, "max_tokens": 6, "seed": 1}
LINES = [
    asked("chat", **CHAT),
    asked("text", "/v1/completions", prompt="hello", max_tokens=6),
    asked("response", "/v1/responses", input="hello", max_output_tokens=6),
    asked("message", "/v1/messages", **CHAT),
    asked("ollama", "/api/chat", messages=MESSAGES, options={"num_predict": 6, "seed": 1}),
    asked("generate", "/api/generate", prompt="hello", options={"num_predict": 6, "seed": 1}),
    asked("bad", messages=MESSAGES, temperature=9),
    asked("other model", **CHAT) | {"body": {**CHAT, "model": "gpt"}},
]


def write(path: Path, lines: list) -> Path:
    written = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(written) + "\n", encoding="utf-8")
    return path


def run(server, requests: Path, answers: Path, at_once: int = 3) -> tuple[Batch, BatchCounts]:
    seen: list[tuple[int, int]] = []
    with open_batch(requests, answers) as (batch, out):
        work = answer_all(create_app(server.context), batch, out, at_once, lambda *done: seen.append(done))
        asyncio.run_coroutine_threadsafe(work, server.loop).result(60)
    assert seen[-1] == (batch.total, batch.total)
    return batch, batch.counts


@pytest.fixture(scope="module")
def server(tiny_model: Path):
    with local_server(tiny_model, ServerSettings("tiny"), FakeEngine()) as running:
        yield running


def read(path: Path) -> dict[str, dict]:
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["custom_id"]: line for line in found}


def test_every_routes_requests_are_answered_in_openais_shape(server, tmp_path):
    requests, answers = write(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    _, counts = run(server, requests, answers)
    assert (counts.kept, counts.answered, counts.failed) == (0, 6, 2)
    found = read(answers)
    assert set(found) == {line["custom_id"] for line in LINES}
    for name, line in found.items():
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert line["response"]["request_id"], name
    said = {name: line["response"]["body"] for name, line in found.items()}
    text = said["chat"]["choices"][0]["message"]["content"]
    assert said["message"]["content"][0]["text"] == said["ollama"]["message"]["content"] == text
    assert said["generate"]["response"] == text
    assert found["bad"]["response"]["status_code"] == 400
    assert said["bad"]["error"]["param"] == "temperature"
    assert found["other model"]["response"]["status_code"] == 404


def test_a_run_goes_on_where_another_was_cut(server, tmp_path):
    requests, answers = write(tmp_path / "in.jsonl", LINES[:4]), tmp_path / "out.jsonl"
    run(server, requests, answers)
    whole = answers.read_text(encoding="utf-8").splitlines()
    lost = {"custom_id": "text", "response": {"status_code": 503}}
    answers.write_text("\n".join([whole[0], json.dumps(lost), whole[2][:40]]), encoding="utf-8")
    kept = json.loads(whole[0])["custom_id"]
    batch, counts = run(server, requests, answers)
    assert {request.custom_id for request in batch.requests} == set(read_ids(LINES[:4])) - {kept}
    assert (counts.kept, counts.answered) == (1, 3)
    assert set(read(answers)) == set(read_ids(LINES[:4]))
    with open_batch(requests, answers) as (again, _):
        assert not again.requests


def read_ids(lines: list[dict]) -> list[str]:
    return [line["custom_id"] for line in lines]


def test_speculation_changes_no_answer(tiny_model, tmp_path, tmp_path_factory):
    model = with_context(tiny_model, tmp_path_factory.mktemp("wide"), 512)
    lines = [
        asked(f"{n}-{on}", **CHAT | {"seed": n, "speculation": on}) for n in range(4) for on in (True, False)
    ]
    requests, answers = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with real_server(model, ServerSettings("tiny")) as server:
        assert run(server, requests, answers)[1].failed == 0
    texts = {name: line["response"]["body"]["choices"][0]["message"] for name, line in read(answers).items()}
    assert all(texts[f"{n}-True"]["content"] == texts[f"{n}-False"]["content"] for n in range(4))
