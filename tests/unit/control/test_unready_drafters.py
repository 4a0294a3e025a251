"""Drafters whose kernels are being compiled are not chosen, and what they return meanwhile says nothing of them."""

from types import SimpleNamespace
from typing import Any

from foreword.control.policy import MeasuredPolicy
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Traits
from foreword.speculation.requests import DraftPlan
from helpers.traffic import CPU, Kind, PretendDrafter, Traffic

HEAD = PretendDrafter("head", {"chat": Kind(0.9, 1.0)}, call=0.2e-3)


def test_a_drafter_is_chosen_while_it_is_ready():
    drafter: Any = SimpleNamespace(traits=Traits(), choices={}, is_ready=True)
    plan = DraftPlan("head", drafter, 8, 8)
    traffic = Traffic(CPU, [HEAD], 1, cohorts=("chat",), plan_of=lambda request: plan, seed=1)
    policy = MeasuredPolicy()
    before = traffic.run(policy, 2000).ratio
    assert before > 1.3
    drafter.is_ready = False
    meanwhile = traffic.run(policy, 2000).ratio
    assert 0.9 < meanwhile < 1.1, "plain decoding, but for tries"
    drafter.is_ready = True
    assert traffic.run(policy, 2000).ratio > 0.9 * before


def test_an_empty_draft_while_kernels_are_compiled_is_not_counted():
    counted: list[int] = []
    estimate = SimpleNamespace(requested=lambda *levels: counted.append(1), changes=0)
    fit = SimpleNamespace(shift=0.0, estimate=estimate)
    state: Any = SimpleNamespace(is_coupled=True)
    part: Any = SimpleNamespace(draft=Draft(), applied=True)
    for is_cold in (True, False):
        draft = Draft(is_cold=is_cold)
        arm = SimpleNamespace(fit=fit)
        flight: Any = SimpleNamespace(draft=draft, arm=arm, useful=0, depth=None, levels=3, is_first=False)
        MeasuredPolicy()._judge(state, flight, part)
        assert len(counted) == (not is_cold)
