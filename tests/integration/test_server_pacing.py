"""Paced streams on a real connection, and the files of the page."""

import json
from dataclasses import replace
from importlib.resources import files

import pytest

from foreword.server.api.pacing import BLOCK_BYTES
from foreword.server.page import PAGE_PATHS
from foreword.server.settings import ServerSettings
from helpers.fake_engine import FakeEngine
from helpers.local_server import LocalServer, local_server
from helpers.waiting import wait_until

EVEN = ServerSettings("tiny", stream_pacing="even")
ASK = {"prompt": "hi", "max_tokens": 40, "seed": 3, "stream": True}


@pytest.fixture(scope="module")
def even(tiny_model):
    with local_server(tiny_model, EVEN, FakeEngine(step_seconds=0.01)) as running:
        yield running


@pytest.fixture(scope="module")
def burst(tiny_model):
    with local_server(tiny_model, ServerSettings("tiny"), FakeEngine(step_seconds=0.01)) as running:
        yield running


def chunks(server: LocalServer, route: str, body: dict[str, object]) -> list[bytes]:
    """The HTTP chunks of a stream, as they were sent."""
    with server.http() as http, http.stream("POST", route, json=body) as answer:
        assert answer.status_code == 200
        return list(answer.iter_raw())


def events(data: bytes) -> list[dict]:
    lines = [line for line in data.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("route", ["/v1/completions", "/generate"])
def test_blocks_have_one_size_and_the_text_is_the_same(even, burst, route):
    body = ASK | ({"raw": True} if route == "/generate" else {})
    data = b"".join(chunks(even, route, body))
    plain = b"".join(chunks(burst, route, body))

    def text(found: bytes) -> str:
        told = [event.get("choices", [event])[0] for event in events(found)]
        return "".join(entry.get("text", "") for entry in told)

    assert text(data) == text(plain) != ""
    assert len(data) % BLOCK_BYTES == 0
    assert data.endswith(b"data: [DONE]\n\n")
    starts = [at for at in range(0, len(data), BLOCK_BYTES) if data[at : at + 1] == b":"]
    assert starts  # how many depends on how late the machine is
    assert len(events(data)) >= 40


def test_openai_clients_read_paced_streams(even, burst):
    def answer(server: LocalServer) -> str:
        messages = [{"role": "user", "content": "hello"}]
        stream = server.openai().chat.completions.create(
            model="tiny", messages=messages, max_tokens=30, seed=1, stream=True, n=2
        )
        told: dict[int, str] = {0: "", 1: ""}
        for chunk in stream:
            for choice in chunk.choices:
                told[choice.index] += choice.delta.content or ""
        return told[0] + "|" + told[1]

    assert answer(even) == answer(burst)


def test_a_client_that_leaves_a_paced_stream_aborts_it(tiny_model):
    with local_server(tiny_model, EVEN, FakeEngine(step_seconds=0.05)) as server:
        with (
            server.http() as http,
            http.stream("POST", "/generate", json=ASK | {"max_tokens": 400}) as answer,
        ):
            next(answer.iter_bytes())
        wait_until(lambda: server.engine.aborted and not server.context.admission.in_flight)


def test_streams_tell_where_tokens_came_from(burst):
    told = events(b"".join(chunks(burst, "/generate", ASK)))
    *grown, end = told
    assert [event["text"] for event in grown] == ["".join(event["origin"]["pieces"]) for event in grown]
    assert all(len(event["origin"]["pieces"]) == len(event["token_ids"]) for event in grown)
    accepted = sum(event["origin"]["from_draft"] for event in grown)
    assert end["speculation"]["accepted"] == accepted > 0
    last = grown[-1]["origin"]["progress"]
    assert (last["output_tokens"], last["passes"]) == (40, end["timings"]["passes"])
    passes = [shown for event in grown for shown in event["origin"]["passes"]]
    assert len(passes) == last["passes"]
    assert sum(shown["gained"] for shown in passes) == 40
    assert sum(len(shown["accepted"]) for shown in passes) == accepted
    assert all(len(shown["guesses"]) == len(shown["parents"]) == 2 for shown in passes)
    assert any(len(shown["accepted"]) < 2 for shown in passes)


def test_a_paced_stream_has_a_pass_with_its_first_token(even):
    *grown, _ = events(b"".join(chunks(even, "/generate", ASK)))
    left = 0
    for event in grown:
        for shown in event["origin"].get("passes", ()):
            assert left == 0
            left = shown["gained"]
        left -= len(event["token_ids"])
    assert left == 0


def test_hidden_speculation_is_hidden_in_streams_too(tiny_model):
    settings = ServerSettings("tiny", show_speculation=False)
    with local_server(tiny_model, settings, FakeEngine()) as server:
        *grown, end = events(b"".join(chunks(server, "/generate", ASK)))
        assert all(set(event["origin"]) == {"pieces"} for event in grown)
        assert "speculation" not in end


def test_the_page_is_static_and_its_data_is_behind_the_key(tiny_model):
    settings = replace(EVEN, api_keys=("secret",))
    with local_server(tiny_model, settings, FakeEngine()) as server, server.http() as http:
        for path in PAGE_PATHS:
            answer = http.get(path)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "tiny" not in answer.text
            assert "secret" not in answer.text
        assert http.get("/page/settings").status_code == 401
        assert http.post("/generate", json=ASK).status_code == 401
        assert http.get("/page/../auth.py").status_code == 401
        known = {"Authorization": "Bearer secret"}
        assert {"ngram", "suffix"} <= set(http.get("/page/settings", headers=known).json()["methods"])
        assert http.get("/page/none.js", headers=known).status_code == 404


def test_the_page_needs_no_inline_code_and_nobody_else():
    folder = files("foreword.server.page") / "static"
    names = {entry.name for entry in folder.iterdir()}
    assert {path.removeprefix("/page/") for path in PAGE_PATHS} - {"/"} | {"index.html"} == names
    for name in names:
        text = (folder / name).read_text(encoding="utf-8")
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in text
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style="):
            assert way not in text, (name, way)
