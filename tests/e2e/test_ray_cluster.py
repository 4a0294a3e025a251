"""Members that a real Ray places, starts and watches."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from foreword.cluster.pools.file import Cluster, RaySettings
from foreword.cluster.pools.members import NODE, TARGET, Member
from helpers.waiting import wait_until

ray = pytest.importorskip("ray", reason="the extra `cluster` is not installed")

from foreword.cluster.rayed.fleet import RayFleet  # noqa: E402


@pytest.fixture(autouse=True)
def _own_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    token = tmp_path / "ray_token"
    token.write_text(secrets.token_hex(32))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def pids(*words: str) -> set[int]:
    """Members with these words in their command."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "foreword.cluster.pools.tied" in command and all(word in command for word in words):
            found.add(int(path.parent.name))
    return found


def light(name: str, kind: str, targets: Path, **more: object) -> Member:
    """A process that needs no model, and can be told apart from those of other tests."""
    command = ("router", "--targets", f"@{targets}", "--port", "0", "--access-log")
    return Member(name, kind, command, f"0.0.0.0:{len(name)}", 0.1, **more)  # type: ignore[arg-type]


def test_members_are_placed_started_again_added_and_ended(tmp_path: Path):
    targets = tmp_path / "targets"
    targets.write_text("")
    mark = f"@{targets}"
    members = [light("d", NODE, targets), light("target", TARGET, targets, near=("d",), is_strict=True)]
    fleet = RayFleet(Cluster(members, RaySettings()))
    try:
        fleet.up()
        wait_until(lambda: {one.name for one in fleet.members()} == {"d", "target"})
        (machine,) = {one.machine for one in fleet.members()}
        assert {one.address for one in fleet.members()} == {f"{machine}:1", f"{machine}:6"}
        wait_until(lambda: len(pids(mark)) == 2)
        before = pids(mark)
        ray.kill(fleet._actors["d"], no_restart=False)
        wait_until(lambda: len(pids(mark)) == 2 and len(pids(mark) & before) == 1)  # another process for it
        fleet.add(light("d-2", NODE, targets))
        wait_until(lambda: len(pids(mark)) == 3 and len(fleet.members()) == 3)
        fleet.drop("d-2")
        assert {one.name for one in fleet.members()} == {"d", "target"}
        assert len(pids(mark)) == 2
    finally:
        fleet.down()
    assert not pids(mark)
    assert not ray.is_initialized()


@pytest.fixture
def cluster_file(tmp_path: Path, tiny_model: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    ports = [28_000 + os.getpid() % 900 * 8 + place for place in range(4)]
    path.write_text(
        f"""
nodes:
  - {{name: d, model: {tiny_model}, listen: "127.0.0.1:{ports[0]}", method: ngram}}
targets:
  - {{name: t, model: {tiny_model}, port: {ports[2]}, near: [d]}}
router: {{port: {ports[3]}}}
ray:
autoscale: {{node: d, least: 2, most: 2}}
"""
    )
    return path


@pytest.fixture
def upped(cluster_file: Path) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-m", "foreword", "cluster", "up", str(cluster_file)])
    try:
        yield process
    finally:
        process.terminate()
        process.wait(120)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_cluster_is_up_serves_survives_and_goes_down(
    cluster_file: Path, upped: "subprocess.Popen[bytes]", tiny_model: Path
):
    def command(name: str) -> "subprocess.CompletedProcess[str]":
        told = [sys.executable, "-m", "foreword", "cluster", name, str(cluster_file)]
        return subprocess.run(told, check=False, capture_output=True, text=True, timeout=200)

    port = cluster_file.read_text().split("router: {port: ")[1].split("}")[0]
    ask = {"prompt": "the the the the", "max_tokens": 30, "temperature": 0, "seed": 1, "ignore_eos": True}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:

        def is_ready() -> bool:
            try:
                return http.get("/ready").status_code == 200
            except httpx.HTTPError:
                return False

        wait_until(is_ready, 200)
        plain = http.post("/v1/completions", json={**ask, "speculation": False}).json()["choices"]
        for _ in range(3):
            assert http.post("/v1/completions", json=ask).json()["choices"] == plain
        wait_until(lambda: command("status").stdout.count("127.0.0.1") >= 6, 200)
        told = command("status")
        assert told.returncode == 0, told
        assert "d-2" in told.stdout
        (node,) = pids("draft-node", f"127.0.0.1:{listens(cluster_file)}")
        actor = int(Path(f"/proc/{node}/stat").read_text().split()[3])
        os.kill(actor, 9)
        assert http.post("/v1/completions", json=ask).json()["choices"] == plain
        wait_until(lambda: bool(pids("draft-node", f"127.0.0.1:{listens(cluster_file)}") - {node}), 200)
        assert http.post("/v1/completions", json=ask).json()["choices"] == plain
    assert command("down").returncode == 0
    assert upped.wait(60) == 0
    assert not pids(str(tiny_model))
    assert command("status").returncode == 1


def listens(file: Path) -> str:
    return file.read_text().split('listen: "127.0.0.1:')[1].split('"')[0]
