"""Members on one machine that come and go, and what is left of them for others to see."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from foreword.cluster.pools.autoscaling import CHECK_SECONDS, Autoscaler
from foreword.cluster.pools.file import ClusterConfig
from foreword.cluster.pools.fleet import ClusterState, LocalFleet, MemberStatus, resize
from foreword.cluster.pools.running import NODE, NODES_LIST, TARGET, Member
from foreword.cluster.pools.scaling import ScaleRule
from helpers.clocks import ScriptedClock
from helpers.waiting import wait_until

DRAFT = Member("d", NODE, ("draft-node", "--listen", "h:8400"), "h:8400")
SERVE = Member("t", TARGET, ("serve",), "h:8000")


class Child:
    """A process that ends when it is told to, some time later."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.is_sent = False

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.is_sent = True

    def kill(self) -> None:
        self.code = 9

    def wait(self, timeout: float | None = None) -> int:
        self.code = 0
        return 0


class World:
    """A fleet whose processes are `Child`s."""

    def __init__(self, lists: Path, scale: ScaleRule | None = None) -> None:
        self.children: dict[str, Child] = {}
        self.lists = lists
        self.fleet = LocalFleet(ClusterConfig([DRAFT, SERVE], None, scale), lists, self._start)
        self.fleet._pools.check_members()

    def _start(self, member: Member, lists: Path) -> Child:
        assert lists == self.lists
        assert member.name not in self.children
        self.children[member.name] = Child()
        return self.children[member.name]

    @property
    def listed(self) -> list[str]:
        return (self.lists / "nodes").read_text().split()


def test_nodes_come_and_go_with_the_list(tmp_path: Path):
    world = World(tmp_path / "lists")
    assert world.listed == ["h:8400"]
    assert (tmp_path / "lists" / "targets").read_text() == "h:8000\n"
    resize(world.fleet, DRAFT, 3)
    world.fleet._pools.check_members()
    assert world.listed == ["h:8400", "h:8401", "h:8402"]
    assert set(world.children) == {"d", "t", "d-2", "d-3"}
    resize(world.fleet, DRAFT, 2)
    world.fleet._pools.check_members()
    assert world.children["d-3"].is_sent
    assert world.listed == ["h:8400", "h:8401"]
    world.children["d-3"].code = 0
    world.fleet._pools.check_members()  # it has ended as it was told, and is not started again
    assert [one.name for one in world.fleet.members()] == ["d", "t", "d-2"]
    world.fleet._pools.close()
    assert all(child.is_sent for child in world.children.values())


def test_a_target_that_names_nodes_has_a_list_of_its_own(tmp_path: Path):
    other = Member("e", NODE, ("draft-node", "--listen", "h:9"), "h:9")
    picky = replace(
        SERVE, name="t/2", arguments=("serve", "--drafters", NODES_LIST), chosen_nodes=("e", "far:1")
    )
    started: dict[str, Path] = {}

    def start(member: Member, lists: Path) -> Child:
        started[member.name] = lists
        return Child()

    fleet = LocalFleet(ClusterConfig([DRAFT, other, SERVE, picky]), tmp_path, start)
    fleet._pools.check_members()
    assert started["t"] == tmp_path
    _, _, listed = picky.command(started["t/2"])
    assert Path(listed[1:]).read_text().split() == ["h:9", "far:1"]
    fleet.drop("e")
    assert Path(listed[1:]).read_text().split() == ["far:1"]
    assert (tmp_path / "nodes").read_text().split() == ["h:8400"]
    fleet._pools.close()


def test_nodes_are_added_and_drained_as_targets_need_them(tmp_path: Path):
    rule = ScaleRule("d", least=2, most=4, up_seconds=10, down_seconds=60)
    world, clock = World(tmp_path / "lists", rule), ScriptedClock()
    steps, busy = 0, True

    def fetch(url: str) -> object:
        nonlocal steps
        assert url == "http://h:8000/health"
        steps += 100
        node = {"level_ms": 0.8 * (1 + 100 / 200), "homes": 100}
        engine = {"running": 400 if busy else 0, "steps": steps}
        return {"engine": engine, "usage": {"device_seconds": steps * 18e-3}, "draft_nodes": [node]}

    scaler = Autoscaler(rule, DRAFT, world.fleet, fetch, clock)

    def size_after(seconds: float) -> int:
        until = clock.now + seconds
        while clock.now < until:
            scaler.rescale()
            clock.pass_by(CHECK_SECONDS)
        return len(world.listed)

    assert len(world.listed) == 2
    assert size_after(10) == 2
    assert size_after(10) == 4  # 400 requests, 115 a node
    busy = False
    assert size_after(50) == 4
    assert size_after(30) == 3
    assert size_after(200) == 2


def test_what_is_up_is_known_to_others_on_this_machine(tmp_path: Path):
    file, told = tmp_path / "cluster.yaml", [MemberStatus("t", TARGET, "h:8000", 3, "h")]
    state, other = ClusterState(file, tmp_path), ClusterState(file, tmp_path)
    assert (other.members(), other.watcher(), other.stop()) == ([], None, False)
    state.write(told)
    assert other.members() == told
    assert other.watcher() is None  # this process is no `cluster up`
    assert ClusterState(tmp_path / "another.yaml", tmp_path).members() == []
    state.forget()
    assert other.members() == []


def test_a_member_ends_with_whoever_watches_it(tmp_path: Path):
    """Even where that is killed: its parent here is a shell that kills itself."""
    said = tmp_path / "said"
    member = f"{sys.executable} -m foreword.cluster.pools.tied $$ router --targets 127.0.0.1:1 --port 0"
    until_it_runs = f"while [ ! -s {said} ]; do sleep 0.1; done"
    script = f"{member} > {said} & echo $! > {tmp_path}/pid; {until_it_runs}; kill -9 $$"
    subprocess.run(["sh", "-c", script], check=False, timeout=60, env=os.environ)
    pid = int((tmp_path / "pid").read_text())
    assert "routing on" in (tmp_path / "said").read_text()
    wait_until(
        lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]
    )


def test_a_member_whose_parent_is_gone_does_not_start():
    tied = [sys.executable, "-m", "foreword.cluster.pools.tied", "1", "--version"]
    found = subprocess.run(tied, check=False, capture_output=True, timeout=60)
    assert (found.returncode, found.stdout) == (1, b"")
