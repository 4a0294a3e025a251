"""Batch files: which lines become requests, which answers are kept, and what is never overwritten."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from foreword.cli import batch as command
from foreword.errors import RequestError
from foreword.server.batch import Batch, answer_all, open_batch
from foreword.server.errors import install_error_handlers
from helpers.command_line import assert_one_line_error, refusal

URL = "/v1/chat/completions"
ANSWER = {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": None}
ERROR = ANSWER | {"response": None, "error": {"code": "invalid_line", "message": "line 1: is not JSON"}}


def asked(custom_id: str, url: str = URL, **body: object) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, *lines: object, end: str = "\n") -> Path:
    written = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(written) + end, encoding="utf-8")
    return path


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    return write(tmp_path / "in.jsonl", asked("a"), asked("b"))


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def read(requests: Path, answers: Path) -> Batch:
    with open_batch(requests, answers) as (batch, _):
        return batch


def ids(batch: Batch) -> list[str]:
    return [request.custom_id for request in batch.requests]


BROKEN = [
    ("{", None, "is not JSON"),
    ("3", None, "must be a JSON object"),
    (asked(""), None, "custom_id: "),
    (asked("a") | {"method": "GET"}, "a", "method: must be POST"),
    (asked("a", "/v1/embeddings"), "a", f"url: must be one of {URL}"),
    (asked("a") | {"body": 3}, "a", "body: must be an object"),
    (asked("a", stream=True), "a", "body.stream: "),
    (asked("a", temperature=float("nan")), "a", "body: is not valid JSON: Out of range float values"),
    (json.dumps(asked("a", seed=7)).replace("7", "1e999"), "a", "body: is not valid JSON: "),
    (asked("a", prompt="\ud800"), "a", "body: is not valid JSON: "),
    (asked("\ud800"), "\ud800", "custom_id: is not valid JSON: "),
]


@pytest.mark.parametrize(("line", "custom_id", "words"), BROKEN)
def test_a_line_that_is_no_request_is_an_error_of_its_own(tmp_path, answers, line, custom_id, words: str):
    batch = read(write(tmp_path / "in.jsonl", line, asked("b")), answers)
    assert ids(batch) == ["b"]
    (refused,) = batch.refusals
    assert refused["custom_id"] == custom_id
    assert refused["error"]["message"].startswith(f"line 1: {words}")


@pytest.mark.parametrize("first", [asked("a"), asked("a", stream=True)])
def test_an_id_that_comes_twice_has_one_line_of_its_own(tmp_path, answers, first):
    batch = read(write(tmp_path / "in.jsonl", first, asked("a")), answers)
    refused = batch.refusals[-1]
    assert refused["error"]["message"] == "line 2: custom_id: 'a' is that of an earlier line"
    assert refused["custom_id"] is None
    assert [*ids(batch), *(line["custom_id"] for line in batch.refusals[:-1])] == ["a"]


def test_a_byte_order_mark_is_skipped_and_blank_lines_are_counted(tmp_path, answers):
    batch = read(write(tmp_path / "in.jsonl", "\ufeff" + json.dumps(asked("a")), "", " ", "{"), answers)
    assert ids(batch) == ["a"]
    assert batch.refusals[0]["error"]["message"] == "line 4: is not JSON"


@pytest.mark.parametrize(("status", "attempts"), [(429, 3), (503, 3), (500, 1)])
def test_only_a_full_or_starting_server_is_asked_again(requests, answers, status: int, attempts: int):
    app, asked_at = FastAPI(), []

    @app.post(URL)
    async def answer() -> Response:
        asked_at.append(1)
        return Response("{}", status, {"Retry-After": "0"}, "application/json")

    with open_batch(requests, answers) as (batch, out):
        asyncio.run(answer_all(app, batch, out, 1, lambda *_: None))
    assert len(asked_at) == 2 * attempts
    assert batch.counts.failed == 2


def test_every_answer_is_in_the_file_before_the_next_request(requests, answers):
    app, written = FastAPI(), []

    @app.post(URL)
    async def answer() -> object:
        written.append(len(answers.read_text("utf-8").splitlines()))
        return {}

    with open_batch(requests, answers) as (batch, out):
        asyncio.run(answer_all(app, batch, out, 1, lambda *_: None))
    assert written == [0, 1]


def test_odd_lines_and_a_route_that_raises_do_not_end_the_rest(tmp_path, answers):
    app = FastAPI()
    install_error_handlers(app, lambda status: None)

    @app.post(URL)
    async def answer(request: Request) -> object:
        if (body := await request.json()).get("fail"):
            raise LookupError
        return {"said": body["prompt"]}

    lines = [asked("\ud800"), asked("fails", fail=True), asked("ä", prompt="ö")]
    with open_batch(write(tmp_path / "in.jsonl", *lines), answers) as (batch, out):
        asyncio.run(answer_all(app, batch, out, 1, lambda *_: None))
    written = answers.read_text(encoding="utf-8")
    assert "\\ud800" in written
    assert "ö" in written
    found = {line["custom_id"]: line for line in map(json.loads, written.splitlines())}
    assert found["\ud800"]["error"]["code"] == "invalid_line"
    assert found["fails"]["response"]["status_code"] == 500
    assert found["ä"]["response"]["body"] == {"said": "ö"}
    assert (batch.counts.answered, batch.counts.failed, batch.counts.done) == (1, 2, batch.total)
    assert ids(read(tmp_path / "in.jsonl", answers)) == ["fails"]


@pytest.mark.parametrize("link", ["itself", "symlink_to", "hardlink_to"])
def test_requests_are_not_overwritten_by_their_answers(requests, answers, link: str):
    before = requests.read_bytes()
    if link == "itself":
        answers = requests
    else:
        getattr(answers, link)(requests)
    assert_one_line_error(refusal("batch", str(requests), str(answers)), "is the file of requests")
    assert requests.read_bytes() == before


OTHER_TEXTS = ["a diary", '{"custom_id": "a"', "{}", "3", json.dumps(asked("a"))]
MALFORMED = [{"custom_id": "a", "response": {"status_code": "x"}}, {"custom_id": 3, "response": None}]


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("line", [*OTHER_TEXTS, *MALFORMED])
def test_a_file_with_other_lines_than_answers_stays(requests, answers, line, end: str):
    before = write(answers, ANSWER, line, end=end).read_bytes()
    run = refusal("batch", str(requests), str(answers))
    assert_one_line_error(run, "line 2 is not an answer of a batch; name another file")
    assert answers.read_bytes() == before


def test_a_cut_line_is_dropped_only_at_the_end(requests, answers):
    cut = json.dumps(ANSWER | {"custom_id": "b", "response": {"body": "ö"}}, ensure_ascii=False).encode()
    middle = cut[: cut.index("ö".encode()) + 1]
    for tail in (middle, b'{"id', b'{"id": "batch_req_5'):
        answers.write_bytes(json.dumps(ANSWER).encode() + b"\n" + tail)
        assert ids(read(requests, answers)) == ["b"]
        assert answers.read_text(encoding="utf-8") == json.dumps(ANSWER) + "\n"
    answers.write_bytes(middle + b"\n" + json.dumps(ANSWER).encode())
    with pytest.raises(RequestError, match="line 1 is not an answer"):
        read(requests, answers)


def test_final_answers_are_kept_and_others_repeated(requests, answers):
    final, again = ANSWER | {"response": {"status_code": 400}}, ANSWER | {"custom_id": "b"}
    for line in (
        again | {"response": {"status_code": 500}},
        ERROR | {"custom_id": "b"},
        ERROR | {"custom_id": None},
    ):
        batch = read(requests, write(answers, final, line))
        assert ids(batch) == ["b"]
        assert (batch.counts.kept, batch.counts.failed_before) == (1, 1)


def test_answers_to_another_file_are_not_overwritten(tmp_path, requests, answers):
    before = write(answers, ANSWER | {"custom_id": "z"}).read_bytes()
    with pytest.raises(RequestError, match="has an answer to 'z', which is not in"):
        read(requests, answers)
    assert answers.read_bytes() == before
    with pytest.raises(RequestError, match="cannot be read"):
        read(tmp_path / "missing.jsonl", tmp_path / "none.jsonl")
    assert not (tmp_path / "none.jsonl").exists()


def test_a_second_run_is_refused_and_loses_nothing(requests, answers):
    write(answers, ANSWER)
    with open_batch(requests, answers) as (_, out):
        assert_one_line_error(
            refusal("batch", str(requests), str(answers)), "in use by another foreword batch"
        )
        out.write(json.dumps(ANSWER | {"custom_id": "b"}) + "\n")
    assert not read(requests, answers).requests


def test_a_file_that_another_run_has_just_replaced_is_in_use(tmp_path, requests, answers, monkeypatch):
    def replaced(*_: object) -> None:
        write(tmp_path / "fresh.jsonl", ANSWER).replace(answers)

    monkeypatch.setattr("fcntl.flock", replaced)
    with pytest.raises(RequestError, match="in use by another foreword batch"):
        read(requests, answers)
    assert json.loads(answers.read_text(encoding="utf-8")) == ANSWER


def test_a_symbolic_link_is_followed_and_the_mode_stays(tmp_path, requests, answers):
    target = write(tmp_path / "target.jsonl", ANSWER)
    target.chmod(0o640)
    answers.symlink_to(target)
    with open_batch(requests, answers) as (_, out):
        out.write("more\n")
    assert answers.is_symlink()
    assert target.read_text(encoding="utf-8").endswith("more\n")
    assert target.stat().st_mode & 0o777 == 0o640


def test_what_cannot_be_written_is_refused_in_one_line(tmp_path, requests):
    missing = tmp_path / "missing" / "out.jsonl"
    assert_one_line_error(refusal("batch", str(requests), str(missing)), "cannot be written: No such file")
    assert_one_line_error(refusal("batch", str(requests), str(tmp_path)), "is not a regular file")
    (tmp_path / "kept.jsonl.part").mkdir()
    blocked = str(tmp_path / "kept.jsonl")
    assert_one_line_error(refusal("batch", str(requests), blocked), "cannot be written: Is a directory")


def test_failed_lines_are_counted_with_those_of_earlier_runs(requests, answers):
    write(answers, ANSWER, ANSWER | {"custom_id": "b", "response": {"status_code": 400}})
    run = refusal("batch", str(requests), str(answers))
    assert run.returncode == 0
    assert run.stderr.splitlines() == [
        f"0 answered, 0 failed, 2 kept from before (1 failed then): {answers}",
        "1 of 2 requests failed; their lines have the errors",
    ]


def test_ctrl_c_says_how_to_go_on(requests, answers, monkeypatch):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "prepare", interrupted)
    run = refusal("batch", str(requests), str(write(answers, ANSWER)))
    assert (run.returncode, run.stderr) == (130, "1 of 2 answered; the same command continues\n")
    assert ids(read(requests, answers)) == ["b"]
