"""Drafts that are only compared with the text: when they are asked for, and what they may cost."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from foreword.backends.batch import Tap
from foreword.control.acceptance import Estimates
from foreword.control.budget import (
    HOST_OBSERVE,
    HOST_PASS,
    HOST_REQUEST,
    MOST_PROBES,
    MOST_SAVED,
    START,
    Account,
    ExplorationBudget,
)
from foreword.control.decider import _is_in_use
from foreword.control.explore import BEFORE_A_PROBE, LEAST_STEPS, WATCH_STEPS, Explorer, Watch
from foreword.control.hindsight import RequestFit
from foreword.control.measured import MeasuredPolicy
from foreword.control.pairs import PairControl
from foreword.control.records import Arm, RequestRecord
from foreword.control.settings import ControlSettings
from foreword.control.value import Group, Pass
from foreword.speculation.drafting import Drafter, DrafterNeeds, Traits
from foreword.speculation.measured.situation import Situation
from foreword.speculation.report import RequestReport, StageSeconds, StepReport
from foreword.speculation.requests import DraftPlan
from foreword.speculation.verdict import Verdict
from helpers.traffic import CPU, H200, Kind, PretendDrafter, Traffic, lookup, states_head


def test_a_drafter_is_not_tried_again_before_the_text_of_its_last_draft_has_come():
    """Asked more often where it is right, it would look as if it had something to say more often."""
    traffic = Traffic(lambda rows: 0.01 * rows, [lookup(code=Kind(0.9, 0.95))], 1, ("code",))
    share = 0.2  # so that it could be tried at every turn
    policy = MeasuredPolicy(ControlSettings(probe_share=share, watch_share=share, idle_probe_share=share))
    tried = 0
    for _ in range(200):
        traffic.run(policy, 1)
        assert not any(control.is_on for control in policy.controls.values())
        for record in policy._records.values():
            found = Counter(id(waiting.fit) for waiting in record.waiting)
            tried += len(found)
            assert max(found.values(), default=0) <= 1
    assert tried


@pytest.mark.parametrize("batch", [8, 32])
def test_a_drafter_whose_cost_nobody_knows_is_tried_where_passes_are_long(batch: int):
    """It is taken to be as dear as a pass, which is more than is saved for others."""
    traffic = Traffic(CPU, [lookup(code=Kind(0.7, 0.9))], batch, ("code",))
    policy = MeasuredPolicy()
    traffic.run(policy, 400 * batch)
    assert sum(control.estimate.asks for control in policy.controls.values()) >= 3


@pytest.mark.parametrize(
    ("is_head", "behind", "price"),
    [(False, 0, 0.1), (False, 50, 0.6), (False, 200, None), (True, 50, 0.6), (True, 20_000, 0.74)],
)
def test_what_a_drafter_has_to_catch_up_with_is_part_of_the_price(
    is_head: bool, behind: int, price: float | None
):
    """A head catches up with as much as there are states of, however long it was left out."""
    bank = ExplorationBudget(accounts={"head": Account(1.0)})
    control = PairControl(Estimates().pair("head", "", "chat"))
    control.probe_seconds, control.probe_more, control.probe_behind = 0.1, 0.1, 0.01
    drafter: Any = SimpleNamespace(traits=Traits(needs=DrafterNeeds(taps=(Tap(1),) if is_head else ())))
    fit: Any = None
    arm = Arm(DraftPlan("head", drafter, 4, 4), control, fit, observed=20)
    record: Any = SimpleNamespace(length=20 + behind)
    found = Explorer(bank, 0, 0.0, {control})._price(record, arm, 0.0)
    assert found == (None if price is None else pytest.approx(price))


def test_a_long_quiet_time_saves_no_more_than_a_little():
    """Or all of it would be spent at once when others come."""
    bank = ExplorationBudget()
    bank.pay("lookup", START)
    bank.accounts["lookup"].dearest = 0.0
    bank.earn(1e6, 0.01, ["lookup"])
    assert bank.accounts["lookup"].balance == MOST_SAVED <= 0.005
    assert not bank.affords("lookup", 0.05)
    bank.earn(1e6, 0.01, ["lookup"])
    assert bank.affords("lookup", 0.05), "one that is dearer is saved for"


@pytest.mark.parametrize(("draft", "each", "saves_for"), [(1e-4, 0.0, 8), (1e-4, 1e-3, 1), (5e-3, 0.0, 1)])
def test_where_the_host_takes_most_of_a_probe_several_are_saved_for(
    draft: float, each: float, saves_for: int
):
    """It finds whom to ask, asks and sorts out what was said as fast for eight requests as for one."""
    control = PairControl(Estimates().pair("lookup", "", "chat"), is_cost_known=True)
    here, group = Pass.of(16, 16, [1.0 + rows for rows in range(64)]), Group(control.estimate.rates, 16, 4)
    control.price(group, here, lambda levels, asks: draft + each * (asks - 1))
    assert control.probe_seconds == draft
    several = draft + MOST_PROBES * HOST_REQUEST
    assert control.probe_pass == pytest.approx(several if saves_for == MOST_PROBES else draft)


def tries(policy: MeasuredPolicy, traffic: Traffic, steps: int) -> list[int]:
    """Drafters' asks of every step."""
    found = []
    for _ in range(steps):
        before = sum(control.estimate.asks for control in policy.controls.values())
        traffic.run(policy, 1)
        found.append(sum(control.estimate.asks for control in policy.controls.values()) - before)
    return found


def test_what_the_host_does_for_a_probe_is_paid_as_well():
    """A lookup that is all but free is tried no more often than the time around its calls allows."""
    free = replace(lookup(code=Kind(0.02, 0.5)), call=1e-6, ask=0.0)
    traffic = Traffic(CPU, [free], 16, ("code",))
    policy = MeasuredPolicy()
    traffic.run(policy, 200 * 16)
    spent, earning = policy.budget.spent, policy.budget.earned_from
    found = tries(policy, traffic, 600)
    passes = sum(asks > 0 for asks in found)
    assert passes
    assert policy.budget.spent - spent >= passes * HOST_PASS + sum(found) * HOST_REQUEST
    assert policy.budget.spent - spent <= 0.01 * (policy.budget.earned_from - earning) + MOST_SAVED
    assert sum(found) >= 3 * passes, "for several requests at once"


def told_record() -> RequestRecord:
    head = states_head()
    plan = DraftPlan("eagle", cast(Drafter, head), 4, 4)
    estimate = Estimates().pair("eagle", "", "chat")
    control = PairControl(estimate, probe_seconds=3e-3, probe_pass=3e-3)
    request: Any = object()
    return RequestRecord("eagle", [Arm(plan, control, RequestFit(estimate))], True, lambda: request)


def test_a_head_is_told_only_while_it_can_be_tried():
    bank = ExplorationBudget(accounts={"eagle": Account(3e-3 + HOST_PASS)})
    watch, record, other = Watch(bank), told_record(), told_record()
    assert not watch.takes(record, 0), "all would be spent before it can be asked"
    bank.accounts["eagle"].balance += (BEFORE_A_PROBE + 0.5) * HOST_OBSERVE
    record.is_watched = watch.takes(record, 0)
    assert record.is_watched
    assert not watch.takes(other, LEAST_STEPS), "another request's turn"
    assert watch.observes(record)
    assert [watch.pay() for _ in range(BEFORE_A_PROBE + 1)] == [True] * BEFORE_A_PROBE + [False]
    assert bank.spent == pytest.approx((BEFORE_A_PROBE + 1) * HOST_OBSERVE)
    assert not watch.takes(record, 1)
    bank.accounts["eagle"].balance = 1.0
    assert not watch.takes(other, LEAST_STEPS - 1), "too soon after the last one"
    assert watch.takes(other, LEAST_STEPS)


def test_a_request_that_a_head_is_told_of_gives_way_after_its_turn():
    watch, one, other = (
        Watch(ExplorationBudget(accounts={"eagle": Account(9.0)})),
        told_record(),
        told_record(),
    )
    assert watch.takes(one, 0)
    assert not watch.takes(other, WATCH_STEPS - 1)
    assert watch.takes(other, WATCH_STEPS)
    assert not watch.takes(one, WATCH_STEPS + 1)


@pytest.mark.parametrize(("is_cold", "billed"), [(False, 4.0), (True, 1.0)])
def test_a_pause_is_little_of_what_a_probe_is_billed_and_what_is_compiled_first_none(
    is_cold: bool, billed: float
):
    traffic = Traffic(CPU, [lookup()], 1, ("chat",))
    policy = MeasuredPolicy()
    traffic.run(policy, 50)
    (control,) = policy.controls.values()
    record: Any = SimpleNamespace(
        is_probe=True, is_coupled=True, asked_depth=1, offered_depth=1, kept_depth=1
    )
    arm: Any = SimpleNamespace(control=control, plan=SimpleNamespace(method=control.estimate.method))
    part: Any = SimpleNamespace(draft_seconds=1e3)
    control.probe_seconds, spent = 2e-3, policy.budget.spent
    policy._answered(record, arm, part, is_cold)
    assert policy.budget.spent - spent == pytest.approx(billed * 2e-3, abs=1e-3)


def test_a_head_is_tried_again_in_a_text_that_it_was_left_out_of_for_long():
    """However long that is, it reads no more than the states that are kept: the price does not grow with the text."""
    head = states_head(chat=Kind(0.9))
    policy, traffic = MeasuredPolicy(), Traffic(CPU, [head], 1, ("chat",))
    traffic.run(policy, 50)
    (record,) = [one for one in policy._records.values() if one.request() is not None][-1:]
    (arm,) = record.arms
    arm.control.probe_behind, record.length, arm.observed = 64e-6, 50_000, 10
    watch = Watch(ExplorationBudget(accounts={head.name: Account(0.02)}))
    assert watch._can_try(record, arm, 0.0)


def test_a_long_request_with_bad_luck_is_tried_again():
    """Its text may change, and nothing else would tell: its luck is that of its own drafts."""
    traffic, policy = Traffic(CPU, [lookup(code=Kind(0.9, 0.9))], 1, ("code",)), MeasuredPolicy()
    traffic.run(policy, 1000)
    traffic._fill()
    traffic.run(policy, 2)
    record = policy._records[traffic.running[0].request_id]
    (arm,) = record.arms
    assert arm.pays
    assert _is_in_use({arm.control: [arm]}, 1)
    arm.control.worth = replace(arm.control.worth, least_shift=arm.fit.shift + 1)
    record.waiting.clear()
    assert not arm.pays and arm.control.in_use
    assert list(Explorer(policy.budget, 0, 0.0, {arm.control})._in_turn(record, 1)) == [arm]
    assert not _is_in_use({arm.control: [arm]}, 1), "and the bank earns for it"


def test_the_bank_earns_for_those_alone_that_could_be_tried():
    """Half of it would else lie with a head that guesses at every step, while nobody finds out about a lookup."""
    share = 0.004
    policy = MeasuredPolicy(ControlSettings(probe_share=share, watch_share=share, idle_probe_share=share))
    traffic = Traffic(CPU, [states_head(chat=Kind(0.8)), lookup()], 1, ("chat",))
    traffic.run(policy, 2000)
    assert policy._decider.methods == ("eagle", "lookup")
    assert policy._decider.idle_methods == ("lookup",)
    policy.budget.accounts["lookup"].balance = -1.0
    policy.budget.accounts["eagle"].balance = 0.0
    seconds = traffic.run(policy, 60).seconds
    assert policy.budget.accounts["eagle"].balance == 0
    earned = policy.budget.accounts["lookup"].balance + 1.0
    assert earned == pytest.approx(share * seconds, rel=0.1)


@pytest.mark.parametrize(
    ("took", "tokens", "left"),
    [(0.018, 1, 3e-3 - 6e-3), (0.012, 2, 5e-3), (9.0, 1, 3e-3 - 8e-3)],
)
def test_a_try_takes_from_the_bank_what_it_has_really_lost(took: float, tokens: int, left: float):
    """What was expected of it is a guess; a pause is not its own, and what it has won is saved up to a bound."""
    policy = MeasuredPolicy()
    policy.budget = ExplorationBudget(accounts={"ngram": Account(3e-3)})
    policy._decider.table, policy._live_try = [0.0, 0.010, 0.011], ("ngram", 2e-3)
    its: Any = SimpleNamespace(speculation=None)
    parts = [SimpleNamespace(asked="ngram", draws=1, request=its)]
    seconds = SimpleNamespace(total=took, draft=0.0)
    report: Any = SimpleNamespace(
        seconds=seconds, tokens=tokens, requests=parts, rows=2, passes=1, decodes_only=True, is_cold=False
    )
    report.calls = {"ngram": 1}
    live: Any = [MagicMock()]
    policy._call_watch = MagicMock()
    policy._measure(report, live)
    assert policy.budget.accounts["ngram"].balance == pytest.approx(left)
    policy._measure(report, live)  # once
    assert policy._live_try is None
    parts.append(SimpleNamespace(asked="eagle", draws=1, request=its))
    policy._live_try = ("ngram", 2e-3)
    policy._measure(report, live)  # what others have won, or lost, is not the try's
    assert policy.budget.accounts["ngram"].balance == pytest.approx(left)
    parts[1].asked, policy._live_try = "ngram", ("ngram", 2e-3)
    policy._measure(
        report, cast(Any, [MagicMock(), MagicMock()])
    )  # nor is what the same wins for another cohort
    assert policy.budget.accounts["ngram"].balance == pytest.approx(left)
    parts[1].asked, policy._live_try, policy.budget.accounts["ngram"].balance = "", ("ngram", 2e-3), 0.0
    policy._measure(report, live)  # a plain request beside it is no such other
    assert policy.budget.accounts["ngram"].balance
    policy._live_try = ("ngram", 2e-3)
    policy.plan([], Situation())  # what was never measured, as it was cold, is not settled with the next step
    assert policy._live_try is None


def test_where_few_steps_are_planned_each_of_them_is_a_turn():
    """On a GPU the policy plans one of many steps: were it not its turn then, drafters would be tried once in hours."""
    policy = MeasuredPolicy()
    turns = []
    for policy.steps in (0, 1, 2, 3, 4, 5, 6, 70, 135, 136):
        turns.append((policy.steps, policy._is_turn()))
    assert [step for step, is_turn in turns if is_turn] == [0, 3, 6, 70, 135]


def test_a_head_is_tried_for_requests_that_have_some_way_to_go():
    """In steady traffic the oldest of a large batch has few steps left: nothing can be found out with it."""
    kinds = {"code": Kind(0.1, spread=0.0, mood=0.0)}
    head = PretendDrafter("head", kinds, 0.3e-3, level=0.1e-3, depth=4, needs=DrafterNeeds(taps=(Tap(1),)))
    traffic, policy = Traffic(H200, [head], 32, ("code",), seed=5, length=100), MeasuredPolicy()
    traffic._fill()
    for place, request in enumerate(traffic.running):
        request.length = 3 + 3 * place  # they end one after the other
    traffic.run(policy, 32 * 200)
    (control,) = policy.controls.values()
    assert not control.is_on
    kinds["code"] = Kind(0.9, spread=0.0, mood=0.0)
    traffic.run(policy, 32 * 800)
    assert control.is_on


def test_a_try_that_nobody_was_asked_in_costs_nothing():
    policy = MeasuredPolicy()
    policy.budget = ExplorationBudget(accounts={"head": Account(3e-3)})
    policy.budget.pay("head", 1e-3)
    policy._live_try = ("head", 1e-3)
    policy.learn(
        StepReport([RequestReport(MagicMock(), Verdict(), 1, 0, True)], seconds=StageSeconds(total=1e-2))
    )
    assert policy.budget.accounts["head"].balance == pytest.approx(3e-3)
