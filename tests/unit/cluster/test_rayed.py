"""What runs inside Ray, without it."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foreword.cluster.pools.ray_fleet import (
    SILENT_SECONDS,
    MemberActor,
    MemberRegistry,
    RayFleet,
    check_guarded,
    check_mode,
    import_ray,
)
from foreword.cluster.pools.running import NODE, NODES_LIST, TARGET, Member
from foreword.errors import RequestError
from helpers.clocks import ScriptedClock


def test_the_registry_knows_who_is_there():
    clock = ScriptedClock()
    registry = MemberRegistry(clock)
    assert registry.report({"name": "a", "kind": "node"}) == [{"name": "a", "kind": "node"}]
    clock.pass_by(SILENT_SECONDS)
    registry.report({"name": "b"})
    assert [one["name"] for one in registry.members()] == ["a", "b"]
    clock.pass_by(1.0)
    assert [one["name"] for one in registry.members()] == ["b"]  # nothing was heard of the other
    registry.leave("b")
    assert registry.members() == []


class Remote:
    """An actor without Ray: its methods run at once."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        for name, method in methods.items():
            setattr(self, name, SimpleNamespace(remote=method))


def test_a_node_that_reports_while_it_is_dropped_is_gone_afterwards():
    registry = MemberRegistry()
    registry.report({"name": "d"})
    fleet = object.__new__(RayFleet)
    fleet._registry = Remote(leave=registry.leave)
    fleet._actors = {"d": Remote(stop=lambda: registry.report({"name": "d"}))}
    fleet._ray = SimpleNamespace(
        get=lambda reply: reply, kill=lambda actor: None, exceptions=SimpleNamespace(RayError=OSError)
    )
    fleet.drop("d")
    assert registry.members() == []
    assert fleet.names() == []


class Child:
    code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.code = 0

    kill = terminate

    def wait(self, timeout: float | None = None) -> int:
        return 0


def test_a_member_tells_where_it_is_and_lists_who_is_there():
    started: list[list[str]] = []

    def start(member: Member, lists: Path) -> Child:
        started.append(member.command(lists))
        return Child()

    registry = MemberRegistry()
    node = MemberActor(Member("d", NODE, ("draft-node",), "0.0.0.0:8400"), "10.0.0.1", registry.report, start)
    node.report_status()
    target = Member("t", TARGET, ("serve", "--drafters", NODES_LIST), "0.0.0.0:8000")
    actor = MemberActor(target, "10.0.0.2", registry.report, start)
    actor._pools.check_members()
    (listed,) = (Path(argument[1:]) for argument in started[0] if argument.startswith("@"))
    assert listed.read_text() == ""
    actor.report_status()
    assert listed.read_text() == "10.0.0.1:8400\n"
    assert [one["address"] for one in registry.members()] == ["10.0.0.1:8400", "10.0.0.2:8000"]
    picky = MemberActor(
        replace(target, name="u", chosen_nodes=("e", "far:1")), "10.0.0.3", registry.report, start
    )
    picky.report_status()
    assert (picky._lists / "nodes").read_text() == "far:1\n"  # not d
    picky.stop()
    registry.leave("u")

    def silent(told: dict[str, Any]) -> list[dict[str, Any]]:
        raise ConnectionError("being started again")

    actor._report = silent
    actor.report_status()  # what was known stays
    assert listed.read_text() == "10.0.0.1:8400\n"
    actor.run()
    actor.stop()
    assert not listed.parent.exists()


@pytest.mark.parametrize(
    ("address", "mode", "why"),
    [
        ("10.0.0.1:6379", "", "start Ray with RAY_AUTH_MODE=token"),
        ("head:6379", "disabled", "start Ray with RAY_AUTH_MODE=token"),
        ("auto", "", "start Ray with RAY_AUTH_MODE=token"),
        ("", "disabled", "leave it out"),
    ],
)
def test_a_ray_without_token_is_refused_in_one_line(address: str, mode: str, why: str):
    with pytest.raises(RequestError, match=why) as refusal:
        check_mode(address, mode)
    assert "\n" not in str(refusal.value)


def test_a_ray_with_token_or_of_this_machine_is_used():
    for address, mode in (("", ""), ("", "token"), ("10.0.0.1:6379", "token"), ("127.0.0.1:6379", "")):
        check_mode(address, mode)


def test_beyond_one_machine_all_who_run_there_must_be_asked_for_a_token():
    check_guarded(1, [])
    check_guarded(2, [True, True])
    for guarded in ([], [True, False]):
        with pytest.raises(RequestError, match="2 machines and asks for no token"):
            check_guarded(2, guarded)


def test_a_missing_ray_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RequestError, match=r"pip install 'foreword\[cluster\]'"):
        import_ray()
