"""`foreword cluster up`, `status` and `down` as a user runs them, with Ray and without."""

import os
import secrets
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from helpers import waiting
from helpers.cluster_members import pids
from helpers.command_line import assert_one_line_error, foreword
from helpers.waiting import wait_until

HAS_RAY = find_spec("ray") is not None
WITH_RAY = pytest.mark.skipif(not HAS_RAY, reason="the extra `cluster` is not installed")

ASK = {"prompt": "the the the the", "max_tokens": 30, "temperature": 0, "seed": 1, "ignore_eos": True}


class Upped:
    """A cluster of two nodes, a target and a router."""

    def __init__(self, folder: Path, model: Path, ray: str) -> None:
        first = 28_000 + os.getpid() % 900 * 4
        self.file = folder / "cluster.yaml"
        self.node = f"127.0.0.1:{first}"
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{first + 3}", timeout=60, verify=False)
        self.file.write_text(
            f"""
nodes: [{{name: d, model: {model}, listen: "{self.node}", method: ngram}}]
targets: [{{name: t, model: {model}, port: {first + 2}, near: [d]}}]
router: {{port: {first + 3}}}
autoscale: {{node: d, least: 2, most: 2}}
{ray}
"""
        )
        self.process = subprocess.Popen([sys.executable, "-m", "foreword", "cluster", "up", str(self.file)])

    def command(self, name: str) -> "subprocess.CompletedProcess[str]":
        told = [sys.executable, "-m", "foreword", "cluster", name, str(self.file)]
        return subprocess.run(told, check=False, capture_output=True, text=True, timeout=200)

    def is_ready(self) -> bool:
        time.sleep(0.3)  # what starts has more use for the time
        try:
            return self.http.get("/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def answer(self, **how: object) -> object:
        return self.http.post("/v1/completions", json={**ASK, **how}).json()["choices"]

    def drafting(self) -> set[int]:
        return pids("draft-node", self.node)


@pytest.fixture(params=["", pytest.param("ray:", marks=WITH_RAY)], ids=["local", "ray"])
def upped(request: pytest.FixtureRequest, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    token = tmp_path / "ray_token"
    token.write_text(secrets.token_hex(32))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(waiting, "PATIENCE", 500.0)  # five processes that import torch
    found = Upped(tmp_path, tiny_model, request.param)
    try:
        yield found
    finally:
        found.process.terminate()
        found.process.wait(120)
        found.http.close()


@pytest.mark.slow
def test_a_cluster_is_up_serves_survives_and_goes_down(upped: Upped, tiny_model: Path):
    wait_until(upped.is_ready)
    plain = upped.answer(speculation=False)
    for _ in range(3):
        assert upped.answer() == plain
    wait_until(lambda: upped.command("status").stdout.count("127.0.0.1") >= 6)
    told = upped.command("status")
    assert told.returncode == 0, told
    assert "d-2" in told.stdout
    (node,) = upped.drafting()
    watcher = int(Path(f"/proc/{node}/stat").read_text().split()[3])
    os.kill(
        node if watcher == upped.process.pid else watcher, 9
    )  # with Ray the actor: its process ends with it
    assert upped.answer() == plain
    wait_until(lambda: upped.drafting() - {node})
    assert upped.answer() == plain
    assert_one_line_error(upped.command("up"), "is up already")
    assert upped.command("down").returncode == 0
    assert upped.process.wait(60) == 0
    assert not pids(str(tiny_model))
    assert upped.command("status").returncode == 1


def test_what_a_cluster_cannot_do_is_said_in_one_line(tmp_path: Path):
    file = tmp_path / "cluster.yaml"
    file.write_text("targets: [{name: t, model: m, port: 1}]\n")
    assert_one_line_error(foreword("cluster", "down", str(file)), "not up on this machine")
    told = foreword("cluster", "status", str(file))
    assert told.returncode == 1
    assert "down" in told.stdout
    up = foreword("cluster", "up", str(file))  # there is no model m
    assert up.returncode == 2
    assert "t refused its options (see above) and is not started again" in up.stderr
    assert "all members of this cluster refused their options" in up.stderr.splitlines()[-1]
    if not HAS_RAY:
        file.write_text("{ray: {}, targets: [{name: t, model: m, port: 1}]}\n")
        assert_one_line_error(foreword("cluster", "up", str(file)), "pip install 'foreword[cluster]'")
