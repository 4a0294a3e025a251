"""`foreword router` as a user runs it, in front of two targets."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from foreword.server.settings import ServerSettings
from helpers.command_line import assert_one_line_error, refusal
from helpers.fake_engine import FakeEngine
from helpers.local_server import local_server
from helpers.serve_process import started
from helpers.waiting import wait_until
from helpers.warm_process import Forked


@contextmanager
def routing(targets: str) -> Iterator[tuple["subprocess.Popen[str] | Forked", httpx.Client]]:
    with started("router", "--targets", targets, "--port", "0") as (process, output):
        url = next(word for word in output.readline().split() if word.startswith("http://"))
        with httpx.Client(base_url=url, timeout=60, verify=False) as client:
            yield process, client


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
    assert_one_line_error(refusal("router"), "--targets")
    assert_one_line_error(refusal("router", "--targets", "nowhere"), "HOST:PORT", "nowhere")
    assert_one_line_error(refusal("router", "--targets", "a:1", "--host", "0.0.0.0"), "--insecure")
    assert_one_line_error(refusal("router", "--targets", "@/no/such/file"), "cannot be read")
