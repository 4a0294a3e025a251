"""`foreword serve` as a user runs it: start, load, crash, stop."""

import json
import os
import signal
import socket
import threading
from dataclasses import replace

import httpx
import pytest

from foreword.engine.config import EngineConfig
from helpers.command_line import assert_one_line_error, foreword, refusal
from helpers.fake_engine import HANGS, STANDS_STILL
from helpers.serve_process import ServeProcess, serve, wait_for_status
from helpers.waiting import PATIENCE, wait_until


class Load:
    """Clients that each send one request and keep what they got."""

    def __init__(self, server: ServeProcess, clients: int, tokens: int, stream: bool) -> None:
        self.outcomes: list[tuple[int, str]] = []
        self._ask = {"prompt": "hello", "max_tokens": tokens, "stream": stream, "speculation": False}
        self._server = server
        self._threads = [threading.Thread(target=self._client) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _client(self) -> None:
        with self._server.http() as http:
            answer = http.post("/v1/completions", json=self._ask)
            self.outcomes.append((answer.status_code, answer.text))

    def wait(self) -> list[tuple[int, str]]:
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a client hangs"
        return self.outcomes


def wait_for_load(server: ServeProcess, answers: int, headers: dict[str, str] | None = None) -> None:
    with server.http() as http:
        wait_until(lambda: http.get("/health", headers=headers).json()["in_flight"] >= answers)


def completed(outcome: tuple[int, str], tokens: int) -> bool:
    status, text = outcome
    if status != 200:
        return False
    if not text.startswith("data: "):
        return json.loads(text)["usage"]["completion_tokens"] == tokens
    events = [json.loads(part[6:]) for part in text.split("\n\n") if part and part != "data: [DONE]"]
    return len("".join(event["choices"][0]["text"] for event in events)) == tokens


def test_crash_restart_and_drain(tiny_model):
    with serve(tiny_model) as server, server.http() as http:
        assert "is ready on http://127.0.0.1:" in server.ready_line
        assert ", context 512 tokens)" in server.ready_line
        assert http.get("/ready").status_code == 200

        whole, streamed = Load(server, 6, 200, stream=False), Load(server, 6, 200, stream=True)
        wait_for_load(server, 12)
        pid = server.engine_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert {status for status, _ in whole.wait()} == {503}
        for status, text in streamed.wait():
            # Those that had begun to get text are told inside the stream.
            assert status == 503 or "engine_unavailable" in text
        wait_for_status(http, "/ready", 200)
        assert server.engine_pid() != pid
        assert http.get("/health").json()["engine_restarts"] == 1
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200

        running = [Load(server, 5, 100, stream) for stream in (False, True)]
        wait_for_load(server, 10)
        server.process.send_signal(signal.SIGTERM)
        wait_for_status(http, "/ready", 503)
        assert http.get("/health").json()["status"] == "draining"
        late = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
        assert late.status_code == 503
        assert "retry-after" in late.headers
        for load in running:
            outcomes = load.wait()
            assert len(outcomes) == 5
            assert all(completed(outcome, 100) for outcome in outcomes)
        assert server.process.wait(PATIENCE) == 0


def test_a_drain_has_a_deadline(tiny_model):
    with serve(tiny_model, "--drain-seconds", "0.2", "--api-key", "secret") as server:
        assert "API key required" in server.ready_line
        outcome: list[httpx.Response] = []
        headers = {"Authorization": "Bearer secret"}

        def ask() -> None:
            body = {"prompt": "x", "max_tokens": 500}
            with server.http() as http:
                outcome.append(http.post("/v1/completions", json=body, headers=headers))

        client = threading.Thread(target=ask)
        client.start()
        wait_for_load(server, 1, headers)
        assert server.terminate() == 0
        client.join(PATIENCE)
        assert outcome[0].status_code == 503
        assert outcome[0].json()["error"]["code"] == "aborted"


def test_an_engine_that_hangs_is_replaced(tiny_model):
    # Longer than a busy machine keeps a process waiting.
    with serve(tiny_model, "--hang-seconds", "6", factory="load_hanging") as server, server.http() as http:
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
        for restarts, fatal in enumerate((HANGS, STANDS_STILL), start=1):
            pid = server.engine_pid()
            load = Load(server, 2, fatal, stream=False)
            assert {status for status, _ in load.wait()} == {503}
            wait_for_status(http, "/ready", 200)
            assert server.engine_pid() != pid
            assert http.get("/health").json()["engine_restarts"] == restarts
            assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
        assert server.terminate() == 0


def test_an_engine_that_cannot_start_is_one_line_and_exit_code_2(tiny_model, capfd):
    with serve(tiny_model, factory="load_broken") as server:
        assert server.ready_line == ""
        assert server.process.wait(PATIENCE) == 2
    assert capfd.readouterr().err.splitlines()[-1] == "foreword: this model is broken; get another"


def test_options_of_the_engine_reach_it(tiny_model, capfd):
    options = [
        "--max-num-batched-tokens=96",
        "--kv-cache-memory-bytes=2M",
        "--no-enable-prefix-caching",
        "--acceptance-rule=token",
        "--max-num-seqs=3",
        "--max-model-len=100",
        "--gpu-memory-utilization=0.5",
        "--enforce-eager",
    ]
    with serve(tiny_model, *options, factory="load_telling") as server:
        assert server.process.wait(30) == 2
    told = json.loads(capfd.readouterr().err.splitlines()[-1].removeprefix("foreword: "))
    assert told == {
        "speculation": None,
        "max_num_batched_tokens": 96,
        "kv_cache_memory_bytes": 2 << 20,
        "enable_prefix_caching": False,
        "acceptance_rule": "token",
        "max_num_seqs": 3,
        "max_model_len": 100,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": True,
    }
    assert EngineConfig(**{key: value for key, value in told.items() if key != "speculation"})


def test_the_line_names_all_drafters_and_the_log_every_request(tiny_model, capfd):
    config = '{"method": ["ngram", "suffix"]}'
    with serve(tiny_model, "--speculative-config", config, "--access-log") as server, server.http() as http:
        assert "ngram+suffix drafting" in server.ready_line
        assert http.get("/health", headers={"Host": "evil.example"}).status_code == 403
        assert http.get("/version", headers={"X-Request-Id": "mine"}).status_code == 200
        assert server.terminate() == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if "foreword.access" in line]
    assert any("GET /health 403 " in line for line in lines)
    assert any("GET /version 200 " in line and line.endswith(" mine") for line in lines)


def test_an_occupied_port_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run = foreword("serve", "--port", str(taken.getsockname()[1]))
    assert_one_line_error(run, "cannot listen", code=1)  # it may be free later


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_other_machines_need_a_key(host):
    run = foreword("serve", "--host", host, env={"FOREWORD_API_KEY": ""})
    assert_one_line_error(run, "API key", "--insecure")


def test_a_bad_speculation_config_is_refused_at_once():
    assert_one_line_error(refusal("serve", "--speculative-config", '{"method": "magic"}'), "magic")


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_over_http_equals_the_library(default_model):
    """As `test_served_answers.py` has it over OpenAI's client, with more ways to guess."""
    from foreword import LLM

    prompts = ["Repeat the word hello 10 times.", "Why is the sky blue?"]
    llm = LLM()
    params = replace(llm.get_default_sampling_params(), temperature=0.8, seed=5, max_tokens=24)
    expected = [output.outputs[0].text for output in llm.generate(prompts, params)]
    config = '{"method": "ngram", "num_speculative_tokens": 4}'
    with serve("smollm2-135m", "--speculative-config", config, factory=None) as server, server.http() as http:
        for prompt, text in zip(prompts, expected, strict=True):
            for override in (True, False, {"method": "suffix"}, {"num_speculative_tokens": 2}):
                body = {
                    "prompt": prompt,
                    "temperature": 0.8,
                    "seed": 5,
                    "max_tokens": 24,
                    "speculation": override,
                }
                answer = http.post("/generate", json=body).json()
                assert answer["text"] == text, override
                assert (answer["speculation"]["drafts"] > 0) <= (override is not False)
        assert server.terminate() == 0
