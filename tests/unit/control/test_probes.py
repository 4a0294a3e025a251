"""Drafts that are only compared with the text: when they are requested, and what they may cost."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from foreword.backends.batch import Tap
from foreword.control.acceptance import Estimates
from foreword.control.decision import Candidate, Decision, Evaluation
from foreword.control.explore import OBSERVED_BEFORE, Explorer
from foreword.control.judging import RequestFit
from foreword.control.options import Moment, Option
from foreword.control.policy import MeasuredPolicy
from foreword.control.requests import Arm, RequestState
from foreword.control.settings import ControlSettings
from foreword.control.value import Benefit, Pass
from foreword.speculation.drafting import Drafter, DrafterNeeds
from foreword.speculation.requests import DraftPlan
from helpers.traffic import CPU, H200, Kind, PretendDrafter, Traffic, lookup, states_head

SETTINGS = ControlSettings()
HOST, SAVED = SETTINGS.probe_host_seconds, SETTINGS.probe_saved_seconds


def test_a_drafter_is_not_tried_again_before_the_text_of_its_last_draft_has_come():
    """Called more often where it is right, it would look as if it had a draft more often."""
    traffic = Traffic(lambda rows: 0.01 * rows, [lookup(code=Kind(0.9, 0.95))], 1, ("code",))
    share = 0.2  # so that it could be tried at every turn
    policy = MeasuredPolicy(
        ControlSettings(probe_share=share, near_probe_share=share, idle_probe_share=share)
    )
    tried = 0
    for _ in range(200):
        traffic.run(policy, 1)
        assert not any(option.is_on for option in policy.options.values())
        for state in policy._states.values():
            found = Counter(id(shadow.fit) for shadow in state.shadows)
            tried += len(found)
            assert max(found.values(), default=0) <= 1
    assert tried


@pytest.mark.parametrize("batch", [8, 32])
def test_a_drafter_whose_cost_nobody_knows_is_tried_where_passes_are_long(batch: int):
    """It is taken to be as slow as a pass, which is more than is saved for others."""
    traffic = Traffic(CPU, [lookup(code=Kind(0.7, 0.9))], batch, ("code",))
    policy = MeasuredPolicy()
    traffic.run(policy, 400 * batch)
    assert sum(option.estimate.requests for option in policy.options.values()) >= 3


def state_of(is_head: bool = True, length: int = 20, observed: int = 20) -> RequestState:
    """A request with one drafter, which knows so many tokens of it."""
    drafter = states_head() if is_head else lookup("eagle")
    estimate = Estimates().of("eagle", "", "chat")
    plan = DraftPlan("eagle", cast(Drafter, drafter), 4, 4)
    arm = Arm(plan, Option(estimate), RequestFit(estimate), observed=observed)
    request: Any = SimpleNamespace(tokens=[0] * length)
    return RequestState("eagle", [arm], True, lambda: request)


def decision_of(*states: RequestState, seconds: float, lag_seconds: float = 0.0) -> Decision:
    """Shadow drafts of all drafters of these requests take so long, and are never verified."""
    options = [arm.option for state in states for arm in state.arms]
    candidates = [Candidate(option, True, 4, seconds, seconds, lag_seconds, seconds) for option in options]
    benefits = dict.fromkeys(options, Benefit())
    here = Pass.of(1, 1, [1.0] * 9)
    return Decision(here, Moment(0, 0.0, 0), benefits, frozenset(), frozenset(), candidates, 0.01, 0.0)


def explorer_with(balance: float) -> Explorer:
    explorer = Explorer(SETTINGS)
    explorer.balances["eagle"] = balance
    return explorer


@pytest.mark.parametrize(
    ("is_head", "lag", "is_tried"),
    [(False, 0, True), (False, 50, True), (False, 200, False), (True, 50, True), (True, 20_000, True)],
)
def test_what_a_drafter_has_to_catch_up_with_is_part_of_the_price(is_head: bool, lag: int, is_tried: bool):
    """A head catches up with as much as there are states of, however long it was left out."""
    state = state_of(is_head, 20 + lag)
    state.was_observed = True
    explorer, plans = explorer_with(1.0), [None]
    decision = decision_of(state, seconds=0.1, lag_seconds=0.01)
    explorer.explore(decision, [state], plans, 0)  # type: ignore[arg-type]
    assert (plans[0] is not None) == is_tried
    if is_tried:
        seconds = 0.1 + 0.01 * (min(lag, 64) if is_head else lag)
        assert explorer.spent == pytest.approx(seconds + HOST)


def test_a_long_quiet_time_saves_no_more_than_a_little():
    """Or all of it would be spent at once when others come."""
    explorer = explorer_with(0.0)
    explorer.earn(1e6, 0.01, ["eagle"])
    assert explorer.balances["eagle"] == SAVED <= 0.005
    assert not explorer.affords("eagle", 0.05)
    explorer.earn(1e6, 0.01, ["eagle"])
    assert explorer.affords("eagle", 0.05), "one that is slower is saved for"


def tries(policy: MeasuredPolicy, traffic: Traffic, steps: int) -> list[int]:
    """Draft requests of every step."""
    found = []
    for _ in range(steps):
        before = sum(option.estimate.requests for option in policy.options.values())
        traffic.run(policy, 1)
        found.append(sum(option.estimate.requests for option in policy.options.values()) - before)
    return found


def test_what_the_host_does_for_a_probe_is_paid_as_well():
    """A lookup that is nearly free is tried no more often than the time around its calls allows."""
    free = replace(lookup(code=Kind(0.02, 0.5)), call=1e-6, ask=0.0)
    traffic = Traffic(CPU, [free], 16, ("code",))
    policy = MeasuredPolicy()
    traffic.run(policy, 200 * 16)
    spent, earning = policy.explorer.spent, policy.explorer.earned_from
    found = tries(policy, traffic, 600)
    passes = sum(asks > 0 for asks in found)
    assert passes
    assert policy.explorer.spent - spent >= passes * HOST + (sum(found) - passes) * HOST / 4 - 1e-9
    assert policy.explorer.spent - spent <= 0.01 * (policy.explorer.earned_from - earning) + SAVED
    assert sum(found) >= 3 * passes, "for several requests at once"


def test_a_head_observes_only_while_it_can_be_tried():
    explorer, state, other = explorer_with(6e-3 + 2 * HOST), state_of(), state_of()
    decision = decision_of(state, other, seconds=3e-3)
    explorer.watch([state], decision, 0)
    assert explorer.watched is None, "all would be spent before it can be called"
    explorer.balances["eagle"] += (OBSERVED_BEFORE + 0.5) * HOST
    explorer.watch([state], decision, 0)
    assert explorer.watched is state
    least = SETTINGS.watch_steps // 4
    explorer.watch([state, other], decision, least)
    assert explorer.watched is state, "another request's turn"
    for _ in range(OBSERVED_BEFORE + 1):
        explorer.pay_observing()
    assert explorer.spent == pytest.approx((OBSERVED_BEFORE + 1) * HOST)
    explorer.watch([state, other], decision, least - 2)
    assert explorer.watched is state, "for a second try"
    explorer.pay("eagle", 3e-3)
    explorer.pay_observing()
    explorer.watch([state, other], decision, least - 1)
    assert explorer.watched is None
    explorer.balances["eagle"] = 1.0
    explorer.watch([state, other], decision, least - 1)
    assert explorer.watched is None, "too soon after the last one"
    explorer.watch([state, other], decision, least)
    assert explorer.watched is other


def test_a_request_that_a_head_observes_gives_way_after_its_turn():
    explorer, one, other = explorer_with(9.0), state_of(), state_of()
    decision = decision_of(one, other, seconds=3e-3)
    explorer.watch([one], decision, 0)
    assert explorer.watched is one
    explorer.watch([one, other], decision, SETTINGS.watch_steps - 1)
    assert explorer.watched is one
    explorer.watch([one, other], decision, SETTINGS.watch_steps)
    assert explorer.watched is other


def test_a_long_request_with_a_bad_ratio_is_tried_again():
    """Its text may change, and nothing else would show it: its ratio is that of its own drafts."""
    drafter = replace(lookup(code=Kind(0.7, 0.7)), call=1.5e-3)
    traffic, policy = Traffic(CPU, [drafter], 1, ("code",)), MeasuredPolicy()
    traffic.run(policy, 1000)
    traffic._fill()
    traffic.run(policy, 2)
    state = policy._states[traffic.running[0].request_id]
    (arm,) = state.arms
    assert policy.decision is not None and arm.gains(policy.decision.benefits[arm.option])
    assert not policy.decision.candidates
    for _ in range(60):
        arm.fit.finished(0, 2.0)
    for _ in range(20):
        policy.decisions.evaluate_again()
        policy.plan([traffic._entry(traffic.running[0])], traffic.situation)
    assert not arm.gains(policy.decision.benefits[arm.option])
    assert [one.option for one in policy.decision.candidates] == [arm.option], "and the budget earns for it"


def test_the_budget_earns_for_those_alone_that_could_be_tried():
    """Half of it would else lie with a head that drafts at every step, while nothing is found out about a lookup."""
    share = 0.004
    policy = MeasuredPolicy(
        ControlSettings(probe_share=share, near_probe_share=share, idle_probe_share=share)
    )
    traffic = Traffic(CPU, [states_head(chat=Kind(0.8)), lookup()], 1, ("chat",))
    traffic.run(policy, 2000)
    assert policy.decision is not None
    assert [one.option.estimate.method for one in policy.decision.candidates] == ["lookup"]
    policy.explorer.balances |= {"lookup": -1.0, "eagle": 0.0}
    seconds = traffic.run(policy, 60).seconds
    assert policy.explorer.balances["eagle"] == 0
    assert policy.explorer.balances["lookup"] + 1.0 == pytest.approx(share * seconds, rel=0.1)


def test_a_head_is_tried_for_requests_that_have_some_way_to_go():
    """In steady traffic the oldest of a large batch has few steps left: nothing can be found out with it."""
    kinds = {"code": Kind(0.1, spread=0.0, mood=0.0)}
    head = PretendDrafter("head", kinds, 0.3e-3, level=0.1e-3, depth=4, needs=DrafterNeeds(taps=(Tap(1),)))
    traffic, policy = Traffic(H200, [head], 32, ("code",), seed=5, length=100), MeasuredPolicy()
    traffic._fill()
    for place, request in enumerate(traffic.running):
        request.length = 3 + 3 * place  # they end one after the other
    traffic.run(policy, 32 * 200)
    (option,) = policy.options.values()
    assert not option.is_on
    kinds["code"] = Kind(0.9, spread=0.0, mood=0.0)
    traffic.run(policy, 32 * 250)
    assert option.is_on


@pytest.mark.parametrize(("gain", "is_uncertain"), [(0.3, True), (0.0, True), (-0.05, False), (-0.5, False)])
def test_more_is_explored_where_the_decision_is_uncertain(gain: float, is_uncertain: bool):
    traffic, policy = Traffic(CPU, [lookup()], 1, ("code",)), MeasuredPolicy()
    traffic.run(policy, 2000)
    traffic._fill()
    state = policy._state(traffic.running[0])  # type: ignore[arg-type]
    assert policy.here is not None
    found = Evaluation([state], policy.here, traffic.situation, SETTINGS, Moment(0, 0.0, 0))
    (option,) = policy.options.values()
    option.usual_gain = gain
    assert (found._probe_share(option) > SETTINGS.idle_probe_share) is is_uncertain
