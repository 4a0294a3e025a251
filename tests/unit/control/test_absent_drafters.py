"""Nodes that go and come back: what is said without them is not counted as theirs."""

from types import SimpleNamespace
from typing import Any

from foreword.control.policy import MeasuredPolicy
from foreword.control.requests import present_name
from foreword.speculation.drafting import Traits
from foreword.speculation.requests import DraftPlan
from helpers.traffic import CPU, Kind, PretendDrafter, Traffic

NODES = PretendDrafter("remote+suffix", {"chat": Kind(0.9, 1.0)}, call=0.2e-3)
HEDGE = PretendDrafter("suffix", {"chat": Kind(0.15, 0.9)}, call=0.05e-3)


def plan(absent: tuple[str, ...] = ()) -> DraftPlan:
    drafter: Any = SimpleNamespace(
        traits=Traits(may_be_absent=True), absent=absent, choices={}, is_ready=True
    )
    return DraftPlan("remote+suffix", drafter, 8, 8)


def test_a_name_is_that_of_those_who_are_there():
    assert present_name(plan()) == "remote+suffix"
    assert present_name(plan(("remote",))) == "suffix"
    assert present_name(plan(("remote", "suffix"))) == "remote+suffix"


def test_what_is_guessed_while_nodes_are_gone_says_nothing_of_them():
    nodes = plan()
    traffic = Traffic(CPU, [NODES, HEDGE], 1, cohorts=("chat",), plan_of=lambda request: nodes, seed=1)
    policy = MeasuredPolicy()

    def first_level(method: str) -> tuple[float, int]:
        pair = policy.estimates.of(method, "", "chat")
        return pair.rates.survival(0)[0], pair.requests

    before = traffic.run(policy, 2000).ratio
    rate, asks = first_level("remote+suffix")
    assert rate > 0.8
    nodes.drafter.absent = ("remote",)  # type: ignore[attr-defined]
    traffic.run(policy, 2000)
    assert first_level("remote+suffix") == (rate, asks)
    assert first_level("suffix")[0] < 0.5
    nodes.drafter.absent = ()  # type: ignore[attr-defined]
    assert traffic.run(policy, 500).ratio > 0.9 * before
