"""`foreword router` as a user runs it, in front of two targets."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from foreword.server.settings import ServerSettings
from helpers.command_line import assert_one_line_error, foreword
from helpers.fake_engine import FakeEngine
from helpers.local_server import local_server
from helpers.waiting import wait_until


@contextmanager
def routing(targets: str) -> Iterator[tuple["subprocess.Popen[str]", httpx.Client]]:
    command = [sys.executable, "-m", "foreword", "router", "--targets", targets, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = next(word for word in process.stdout.readline().split() if word.startswith("http://"))
        with httpx.Client(base_url=url, timeout=60, verify=False) as client:
            yield process, client
    finally:
        process.kill()
        process.wait(30)


def test_one_address_serves_two_targets_and_goes_on_with_one(tiny_model: Path):
    ask = {"prompt": "the cat", "max_tokens": 4, "temperature": 0, "seed": 1}
    settings = ServerSettings("tiny")
    with local_server(tiny_model, settings, FakeEngine()) as stays, ExitStack() as goes:
        other = goes.enter_context(local_server(tiny_model, settings, FakeEngine()))
        with routing(f"{stays.url},{other.url.removeprefix('http://')}") as (process, client):

            def states() -> list[str]:
                return sorted(target["state"] for target in client.get("/health").json()["targets"])

            assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
            answer = client.post("/v1/completions", json=ask).json()["choices"]
            with client.stream("POST", "/v1/completions", json={**ask, "stream": True}) as stream:
                assert list(stream.iter_lines())[-2] == "data: [DONE]"
            goes.close()
            wait_until(lambda: states() == ["down", "ready"])
            for _ in range(3):
                assert client.post("/v1/completions", json=ask).json()["choices"] == answer
            assert client.post("/v1/completions", json={"prompt": 3}).status_code == 400
            assert 'foreword:router_answers_total{code="200"' in client.get("/metrics").text
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


def test_what_a_router_cannot_do_is_said_in_one_line():
    assert_one_line_error(foreword("router"), "--targets")
    assert_one_line_error(foreword("router", "--targets", "nowhere"), "HOST:PORT", "nowhere")
    assert_one_line_error(foreword("router", "--targets", "a:1", "--host", "0.0.0.0"), "--insecure")
    assert_one_line_error(foreword("router", "--targets", "@/no/such/file"), "cannot be read")
