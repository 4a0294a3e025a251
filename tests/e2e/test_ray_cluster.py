"""Members that a real Ray places, starts and watches."""

import secrets
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from foreword.cluster.pools.file import ClusterConfig, RaySettings
from foreword.cluster.pools.ray_fleet import RayFleet, import_ray
from foreword.cluster.pools.running import NODE, TARGET, Member
from helpers.cluster_members import pids
from helpers.waiting import wait_until

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="the extra `cluster` is not installed")


@pytest.fixture(autouse=True)
def _own_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)  # Ray puts its own in place
    token = tmp_path / "ray_token"
    token.write_text(secrets.token_hex(32))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    yield
    signal.signal(signal.SIGTERM, before)


def light(name: str, kind: str, targets: Path, **more: object) -> Member:
    """A process that needs no model, and can be told apart from those of other tests."""
    command = ("router", "--targets", f"@{targets}", "--port", "0", "--access-log")
    return Member(name, kind, command, f"0.0.0.0:{len(name)}", 0.1, **more)  # type: ignore[arg-type]


def test_members_are_placed_started_again_added_and_ended(tmp_path: Path):
    ray = import_ray()
    targets = tmp_path / "targets"
    targets.write_text("")
    mark = f"@{targets}"
    members = [light("d", NODE, targets), light("target", TARGET, targets, near=("d",), is_strict=True)]
    fleet = RayFleet(ClusterConfig(members, RaySettings()))
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
