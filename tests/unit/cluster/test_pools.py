"""A cluster from a file: what it says, who is started again, what is told of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from foreword.cluster.pools.autoscaling import cluster_status
from foreword.cluster.pools.file import RaySettings, read_cluster
from foreword.cluster.pools.fleet import MemberLog, MemberStatus
from foreword.cluster.pools.running import (
    CALM_SECONDS,
    LONGEST_PAUSE,
    NODE,
    REFUSED,
    TARGET,
    Member,
    Pools,
    lists_of,
    replica_number,
)
from foreword.errors import RequestError
from helpers.clocks import ScriptedClock

CLUSTER = """
nodes:
  - {name: d1, model: draft.gguf, listen: "127.0.0.1:8400", options: {tree_width: 2}, labels: host=a}
  - {name: d2, model: draft.gguf, listen: "unix:/run/d2", method: ngram, capacity: 9, args: [--no-run-ahead]}
targets:
  - {name: t1, model: big.gguf, port: 8000, labels: host=a}
  - {name: t2, model: big.gguf, port: 8001, host: "::1", drafters: "127.0.0.1:8400"}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return path


def test_the_file_becomes_commands(tmp_path: Path):
    d1, d2, t1, t2 = read_cluster(written(tmp_path, CLUSTER)).members
    assert d1.arguments[:5] == ("draft-node", "--model", "draft.gguf", "--listen", "127.0.0.1:8400")
    assert d1.arguments[5:] == ("--labels", "host=a", "--options", '{"tree_width": 2}')
    assert d2.arguments[5:] == ("--method", "ngram", "--capacity", "9", "--no-run-ahead")
    assert t1.arguments[-4:] == ("--drafters", "127.0.0.1:8400,unix:/run/d2", "--drafters-labels", "host=a")
    assert t2.arguments[-2:] == ("--drafters", "127.0.0.1:8400")
    assert [member.is_target for member in (d1, d2, t1, t2)] == [False, False, True, True]
    assert t2.url == "http://[::1]:8001"


def test_members_that_come_and_go_are_found_in_lists(tmp_path: Path):
    more = "router: {port: 8080}\nray:\nautoscale: {node: d1, most: 3, use: 0.6}\n"
    text = CLUSTER.replace("port: 8000,", "port: 8000, near: [d1, d2], strict: true, gpus: 1,")
    cluster = read_cluster(written(tmp_path, text + more))
    assert cluster.ray == RaySettings()
    assert cluster.scale is not None
    assert (cluster.scale.node, cluster.scale.least, cluster.scale.most, cluster.scale.use) == (
        "d1",
        1,
        3,
        0.6,
    )
    target, router = cluster.member("t1"), cluster.member("router")
    assert (target.near, target.is_strict, target.gpus) == (("d1", "d2"), True, 1.0)
    assert "@/lists/nodes" in target.command(Path("/lists"))
    assert cluster.member("t2").command(Path("/lists"))[-1] == "127.0.0.1:8400"
    assert router.command(Path("/lists"))[:3] == ["router", "--targets", "@/lists/targets"]
    assert cluster.cpus == 7.0  # five members, and two more nodes
    without = read_cluster(written(tmp_path, CLUSTER + "router: {port: 8080}\n"))
    assert without.member("router").arguments[2] == "127.0.0.1:8000,[::1]:8001"


@pytest.mark.parametrize("named", ['"d2, 127.0.0.1:9"', '[d2, "127.0.0.1:9"]'])
def test_a_target_names_its_nodes_by_name_or_address(tmp_path: Path, named: str):
    text = CLUSTER.replace('drafters: "127.0.0.1:8400"', f"drafters: {named}")
    assert read_cluster(written(tmp_path, text)).member("t2").arguments[-1] == "unix:/run/d2,127.0.0.1:9"
    listed = read_cluster(written(tmp_path, text + "ray:\n")).member("t2")
    assert listed.command(Path("/lists"))[-1] == "@/lists/nodes"
    assert listed.chosen_nodes == ("d2", "127.0.0.1:9")
    scaled = read_cluster(written(tmp_path, text + "autoscale: {node: d2, most: 3}\n"))
    assert scaled.member("t2").chosen_nodes == ("d2", "d2-2", "d2-3", "127.0.0.1:9")
    assert scaled.member("t1").chosen_nodes == ()


def test_a_target_may_ask_nobody_or_whom_a_file_of_its_own_lists(tmp_path: Path):
    nobody = CLUSTER.replace('drafters: "127.0.0.1:8400"', "drafters: []")
    assert "--drafters" not in read_cluster(written(tmp_path, nobody)).member("t2").arguments
    own = CLUSTER.replace('drafters: "127.0.0.1:8400"', 'drafters: "@/my/list"')
    assert read_cluster(written(tmp_path, own)).member("t2").arguments[-1] == "@/my/list"


def test_replicas_have_ports_of_their_own_and_what_listens_anywhere_is_found_on_its_machine():
    node = Member("d", NODE, ("draft-node", "--listen", "0.0.0.0:8400", "--no-run-ahead"), "0.0.0.0:8400")
    assert node.replica(1) is node
    third = node.replica(3)
    assert (third.name, third.address) == ("d-3", "0.0.0.0:8402")
    assert third.arguments == ("draft-node", "--listen", "0.0.0.0:8402", "--no-run-ahead")
    assert third.on("10.0.0.7").address == "10.0.0.7:8402"
    assert node.on("fe80::1").address == "[fe80::1]:8400"
    local = Member("d", NODE, ("draft-node", "--listen", "unix:/run/d"), "unix:/run/d")
    assert local.replica(2).address == "unix:/run/d-2"
    assert local.on("10.0.0.7") is local
    assert [replica_number(name, "d") for name in ("d", "d-3", "d-x", "e", "dd-2")] == [1, 3, 0, 0, 0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "neither YAML nor JSON"),
        ("[]", "must be an object"),
        ("{}", "neither nodes nor targets"),
        ("nodes: 3", "nodes must be a list"),
        ("nodes: [{name: a}]", "listen must be a text"),
        ("nodes: [{name: a, model: m, listen: nowhere}]", "address"),
        ("nodes: [{name: a, model: m, listen: 'h:1', colour: red}]", "unknown key 'colour'"),
        ("targets: [{name: a, model: m, port: -1}]", "port must be a whole number"),
        ("targets: [{name: a, model: m, port: 1}, {name: a, model: m, port: 2}]", "the same name"),
        ("targets: [{name: a, model: m, port: 1}, {name: b, model: m, port: 1}]", "a and b both listen on"),
        ("{targets: [{name: a, model: m, port: 1}], router: {port: 1}}", "a and router both listen on"),
        ("targets: [{name: a, model: m, port: 1, args: [1]}]", "args must be a list of texts"),
        ("targets: [{name: a, model: m, port: 1, cpus: many}]", "cpus must be a number"),
        ("targets: [{name: a, model: m, port: 1, near: [b]}]", "near 'b', which is no node"),
        (
            "targets: [{name: a, model: m, port: 1, drafters: [d9]}]",
            "'d9', which is neither one of the nodes",
        ),
        ("targets: [{name: a, model: m, port: 1, drafters: 5}]", "drafters must be a text"),
        ("nodes: [{name: 'a:1', model: m, listen: 'h:1'}]", "no colon"),
        (
            "{autoscale: {node: a}, nodes: [{name: a, model: m, listen: 'h:1'}, {name: a-2, model: m, listen: 'h:2'}]}",
            "rename it",
        ),
        ("router: {port: 1}", "neither nodes nor targets"),
        ("{router: {port: 1}, nodes: [{name: a, model: m, listen: 'h:1'}]}", "router needs targets"),
        ("{ray: {colour: red}, targets: [{name: a, model: m, port: 1}]}", "unknown key 'colour'"),
        ("{autoscale: {node: x}, targets: [{name: a, model: m, port: 1}]}", "autoscale.node"),
        ("{autoscale: {node: a, least: 0}, nodes: [{name: a, model: m, listen: 'h:1'}]}", "least"),
        ("{autoscale: {node: a, node_price: 1}, nodes: [{name: a, model: m, listen: 'h:1'}]}", "both of"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(tmp_path: Path, text: str, why: str):
    with pytest.raises(RequestError, match=why):
        read_cluster(written(tmp_path, text))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(RequestError, match="cannot be read"):
        read_cluster(tmp_path / "nothing.yaml")


class Child:
    """A process that ends when it is told to."""

    def __init__(self, name: str, ended: list[str]) -> None:
        self.code: int | None = None
        self._name = name
        self._ended = ended

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.code = 0
        self._ended.append(self._name)

    kill = terminate

    def wait(self, timeout: float | None = None) -> int:
        assert self.code is not None
        return self.code


def test_members_that_end_are_started_again_ever_later_and_targets_end_first():
    clock, started, ended = ScriptedClock(), [], []

    def start(member: Member) -> Child:
        started.append((clock.now, Child(member.name, ended)))
        return started[-1][1]

    members = [Member("node", NODE, ("draft-node",)), Member("target", TARGET, ("serve",), "x:1")]
    pools = Pools(members, start, clock)
    pools.check_members()
    assert len(started) == 2
    begins = []
    for _ in range(8):
        started[-1][1].code = 1  # the target, and then each that was started for it
        pools.check_members()
        while started[-1][1].code is not None:
            clock.pass_by(0.5)
            pools.check_members()
        begins.append(started[-1][0])
    pauses = [later - earlier for earlier, later in zip([0.0, *begins], begins, strict=False)]
    assert pauses[:4] == [1, 2, 4, 8]
    assert pauses[-1] == LONGEST_PAUSE
    clock.pass_by(CALM_SECONDS + 1)
    started[-1][1].code = 1
    before = clock.now
    pools.check_members()
    clock.pass_by(1.0)
    pools.check_members()
    assert started[-1][0] == before + 1.0
    assert pools.restarts() == {"node": 0, "target": 9}
    pools.close()
    assert ended == ["target", "node"]


def test_a_member_that_cannot_use_what_it_was_given_is_not_started_again(caplog: pytest.LogCaptureFixture):
    clock, started = ScriptedClock(), []

    def start(member: Member) -> Child:
        started.append(Child(member.name, []))
        return started[-1]

    pools = Pools([Member("node", NODE, ("draft-node",))], start, clock)
    pools.check_members()
    started[0].code = REFUSED
    for _ in range(5):
        clock.pass_by(LONGEST_PAUSE)
        pools.check_members()
    assert len(started) == 1
    assert (pools.refused(), pools.restarts()) == ({"node"}, {"node": 0})
    (line,) = caplog.messages
    assert "not started again" in line
    pools.close()


@pytest.mark.parametrize("is_watched", [True, False])
def test_one_that_has_run_before_is_started_again_whatever_it_says(is_watched: bool):
    """What it was given can be used: something else must be wrong, such as memory that is taken for now."""
    clock, started = ScriptedClock(), []

    def start(member: Member) -> Child:
        started.append(Child(member.name, []))
        return started[-1]

    pools = Pools([Member("node", NODE, ("draft-node",))], start, clock, have_run=not is_watched)
    pools.check_members()
    clock.pass_by(CALM_SECONDS + 1 if is_watched else 1.0)
    started[0].code = REFUSED
    pools.check_members()
    clock.pass_by(1.0)
    pools.check_members()
    assert len(started) == 2
    started[1].code = REFUSED
    clock.pass_by(1.0)
    pools.check_members()
    clock.pass_by(2.0)
    pools.check_members()
    assert len(started) == 3
    assert not pools.refused()


def test_of_members_elsewhere_everything_is_told_once(caplog: pytest.LogCaptureFixture):
    news, here = MemberLog(), MemberStatus("d", NODE, "m:1", machine="m")
    with caplog.at_level("INFO"):
        for told in ([], [here], [here], [replace(here, restarts=1)], [replace(here, is_refused=True)]):
            news.log_changes(told)
            news.log_changes(told)
    assert [line.split(" and ")[0] for line in caplog.messages] == [
        "d is started on m",
        "d has ended",
        "d refused its options",
    ]


def test_the_status_is_what_targets_tell():
    node = {
        "address": "127.0.0.1:1", "state": "up", "reason": "", "homes": 3, "waits": 5, "trips": 0,
        "first_ms": 1.5, "level_ms": None, "acceptance": 0.8,
    }  # fmt: skip
    told = {"status": "ok", "engine": {"running": 2, "waiting": 1}, "draft_nodes": [node]}
    told |= {"speculation": {"tau": 2.5}, "usage": {"cost_per_million_reserved": 3.0}}

    def fetch(url: str) -> object:
        if url == "http://x:1/health":
            return told
        raise ConnectionRefusedError("nobody")

    targets, nodes = cluster_status({"a": "x:1", "b": "x:2"}, fetch)
    assert [(one.name, one.state, one.running, one.waiting, one.is_ok) for one in targets] == [
        ("a", "ok", 2, 1, True),
        ("b", "down", 0, 0, False),
    ]
    assert (targets[0].tokens_per_pass, targets[0].cost_per_million) == (2.5, 3.0)
    assert targets[1].reason == "nobody"
    assert [(one.target, one.node, one.homes) for one in nodes] == [("a", "127.0.0.1:1", 3)]


@pytest.mark.parametrize("name", ["nodes", "targets", "..", "a/b"])
def test_whatever_a_target_is_called_its_lists_are_in_a_folder_of_their_own(tmp_path: Path, name: str):
    folder = lists_of(Member(name, TARGET, ("serve",), "x:1", chosen_nodes=("a",)), tmp_path)
    assert folder.parent == tmp_path
    assert folder.name not in ("nodes", "targets", "..")
