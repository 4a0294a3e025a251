"""`--tensor-parallel-size` as a user gives it: answers, a rank that is killed, an engine that is killed."""

import os
import signal
from pathlib import Path

import httpx
import pytest

from helpers.command_line import assert_one_line_error, foreword
from helpers.serve_process import ServeProcess, serve, wait_for_status
from helpers.waiting import wait_until

pytestmark = pytest.mark.slow

ON_TWO = ("--device", "cpu", "--tensor-parallel-size", "2")
ASKED = {"prompt": "the sky is", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in found for child in file.read_text(encoding="utf-8").split()]


def answer(http: httpx.Client) -> str:
    got = http.post("/v1/completions", json=ASKED)
    assert got.status_code == 200, got.text
    return got.json()["choices"][0]["text"]


def ranks(server: ServeProcess) -> tuple[int, int]:
    """The engine and its only worker."""
    engine = server.engine_pid()
    assert engine is not None
    (worker,) = children(engine)
    return engine, worker


def test_a_killed_rank_ends_the_engine_which_comes_back(tiny_model: Path, tmp_path: Path):
    log = tmp_path / "log"
    with (
        log.open("w") as file,
        serve(tiny_model, *ON_TWO, factory=None, log=file) as server,
        server.http() as http,
    ):
        first = answer(http)
        engine, worker = ranks(server)
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: http.get("/health").json()["engine_restarts"] == 1)
        wait_for_status(http, "/ready", 200)
        assert answer(http) == first
        again, second = ranks(server)
        assert again != engine
        os.kill(again, signal.SIGKILL)  # which takes its worker with it
        wait_until(lambda: not Path(f"/proc/{second}").exists())
        wait_until(lambda: http.get("/health").json()["engine_restarts"] == 2)
        wait_for_status(http, "/ready", 200)
        assert answer(http) == first
        _, last = ranks(server)
        assert server.terminate() == 0
        wait_until(lambda: not Path(f"/proc/{last}").exists())
    told = [line for line in log.read_text().splitlines() if f"rank 1 (process {worker}) was killed" in line]
    assert told
    assert "Traceback" not in log.read_text()


def test_generate_on_two_ranks(tiny_model: Path):
    asked = ("generate", "the sky is", "--model", str(tiny_model), "--temperature", "0", "--max-tokens", "8")
    one = foreword(*asked, "--device", "cpu", "--backend", "torch")
    two = foreword(*asked, *ON_TWO)
    assert two.returncode == 0, two.stderr
    assert two.stdout == one.stdout
    refused = foreword(*asked, "--device", "cpu", "--tensor-parallel-size", "3")
    assert_one_line_error(refused, "tensor_parallel_size 3 does not fit", "use 1 or 2 or 4")
