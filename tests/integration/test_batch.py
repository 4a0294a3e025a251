"""`foreword batch`: files of requests, answered without a port."""

import asyncio
import json
from pathlib import Path

import pytest

from foreword.errors import RequestError
from foreword.server.app import create_app
from foreword.server.batch import Batch, BatchCounts, answer_all, begin_answers
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
BROKEN = [
    ("{", "line 1: is not JSON"),
    ("3", "line 1: must be a JSON object"),
    (asked("", **CHAT), "line 1: custom_id: "),
    (asked("a", **CHAT) | {"method": "GET"}, "line 1: method: must be POST"),
    (asked("a", "/v1/embeddings"), "line 1: url: must be one of /v1/chat/completions"),
    (asked("a") | {"body": 3}, "line 1: body: must be an object"),
    (asked("a", stream=True), "line 1: body.stream: "),
]


def write(path: Path, lines: list) -> Path:
    written = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(written) + "\n", encoding="utf-8")
    return path


def run(server, batch: Batch, out, at_once: int = 3) -> BatchCounts:
    seen: list[tuple[int, int]] = []
    work = answer_all(create_app(server.context), batch, out, at_once, lambda *done: seen.append(done))
    counts = asyncio.run_coroutine_threadsafe(work, server.loop).result(60)
    assert seen[-1][0] == seen[-1][1] == len(batch.answered) + len(batch.refused) + len(batch.requests)
    return counts


@pytest.fixture(scope="module")
def server(tiny_model: Path):
    with local_server(tiny_model, ServerSettings("tiny"), FakeEngine()) as running:
        yield running


def read(path: Path) -> dict[str, dict]:
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["custom_id"]: line for line in found}


def test_every_routes_requests_are_answered_in_openais_shape(server, tmp_path):
    requests, answers = write(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    with begin_answers(answers, []) as out:
        counts = run(server, Batch.read(requests, answers), out)
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


@pytest.mark.parametrize(("line", "words"), BROKEN)
def test_a_line_that_is_no_request_is_an_error_of_its_own(tmp_path, line, words: str):
    batch = Batch.read(write(tmp_path / "in.jsonl", [line, asked("b", **CHAT)]), tmp_path / "out.jsonl")
    assert [request.custom_id for request in batch.requests] == ["b"]
    (refused,) = batch.refused
    assert refused["custom_id"] is None
    assert refused["error"]["message"].startswith(words)


def test_an_id_that_comes_twice_is_answered_once(tmp_path):
    lines = [asked("a", **CHAT), asked("a", **CHAT)]
    batch = Batch.read(write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    assert len(batch.requests) == 1
    assert batch.refused[0]["error"]["message"] == "line 2: custom_id: 'a' is that of an earlier line"


def test_a_run_goes_on_where_another_was_cut(server, tmp_path):
    requests, answers = write(tmp_path / "in.jsonl", LINES[:4]), tmp_path / "out.jsonl"
    with begin_answers(answers, []) as out:
        run(server, Batch.read(requests, answers), out)
    whole = answers.read_text(encoding="utf-8").splitlines()
    lost = {"custom_id": "text", "response": {"status_code": 503}}
    answers.write_text("\n".join([whole[0], json.dumps(lost), whole[2][:40]]), encoding="utf-8")
    kept = json.loads(whole[0])["custom_id"]
    batch = Batch.read(requests, answers)
    assert {request.custom_id for request in batch.requests} == set(read_ids(LINES[:4])) - {kept}
    with begin_answers(answers, batch.answered) as out:
        counts = run(server, batch, out)
    assert (counts.kept, counts.answered) == (1, 3)
    assert set(read(answers)) == set(read_ids(LINES[:4]))
    again = Batch.read(requests, answers)
    assert not again.requests


def read_ids(lines: list[dict]) -> list[str]:
    return [line["custom_id"] for line in lines]


def test_answers_to_another_file_are_not_overwritten(tmp_path):
    answers = write(
        tmp_path / "out.jsonl", [{"custom_id": "z", "response": {"status_code": 200, "body": {}}}]
    )
    with pytest.raises(RequestError, match="has an answer to 'z', which is not in"):
        Batch.read(write(tmp_path / "in.jsonl", [asked("a", **CHAT)]), answers)
    with pytest.raises(RequestError, match="cannot be read"):
        Batch.read(tmp_path / "missing.jsonl", tmp_path / "none.jsonl")


def test_speculation_changes_no_answer(tiny_model, tmp_path, tmp_path_factory):
    model = with_context(tiny_model, tmp_path_factory.mktemp("wide"), 512)
    lines = [
        asked(f"{n}-{on}", **CHAT | {"seed": n, "speculation": on}) for n in range(4) for on in (True, False)
    ]
    requests, answers = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with real_server(model, ServerSettings("tiny")) as server, begin_answers(answers, []) as out:
        assert run(server, Batch.read(requests, answers), out).failed == 0
    texts = {name: line["response"]["body"]["choices"][0]["message"] for name, line in read(answers).items()}
    assert all(texts[f"{n}-True"]["content"] == texts[f"{n}-False"]["content"] for n in range(4))
