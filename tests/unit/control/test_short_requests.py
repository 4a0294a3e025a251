"""The measured policy where every request is new: a tenant of its own, a prompt, a short answer."""

from dataclasses import replace
from typing import Any

import pytest

from foreword.control.explore import OBSERVED_BEFORE
from foreword.control.fixed import FixedPolicy
from foreword.control.policy import MeasuredPolicy
from foreword.control.settings import ControlSettings
from foreword.speculation.measured.calls import CallCost
from foreword.speculation.measured.curve import CostCurve
from foreword.speculation.requests import DraftPlan, PassEntry
from helpers.traffic import TWO_CORES, Kind, Traffic, interpolated, lookup, states_head

DEAR_PROMPTS = interpolated([(1, 7.0), (4, 9.0), (64, 110.0), (512, 5000.0)])
"""Where another row beside a long chunk takes longer than a token alone."""

KINDS = {
    "summary": Kind(0.55, 0.99, 0.3, 0.3),
    "rag": Kind(0.5, 0.99, 0.3, 0.3),
    "chat": Kind(0.7, 0.99, 0.3, 0.3),
}


@pytest.mark.parametrize(("cohort", "prompt"), [("summary", 1500), ("rag", 900), ("chat", 60)])
def test_short_answers_to_new_tenants_are_as_fast_as_with_the_best_fixed_depth(cohort: str, prompt: int):
    """A head, ninety tokens after each prompt, and nothing known of any of these tenants."""
    head = states_head(**KINDS)

    def traffic(plan: DraftPlan | None) -> Traffic:
        found = Traffic(TWO_CORES, [head], 1, (cohort,), prompt=prompt, length=96, has_own_tenants=True)
        found.plan_of = None if plan is None else lambda _: plan
        return found

    drafter: Any = head
    fixed = [
        traffic(DraftPlan("eagle", drafter, depth, depth, is_fixed=True)).run(FixedPolicy(), 1500).ratio
        for depth in (1, 2, 3)
    ]
    policy, measured = MeasuredPolicy(), traffic(None)
    first = measured.run(policy, 600).ratio  # the first requests of all
    later = measured.run(policy, 2500).ratio
    assert later >= 0.97 * max(fixed)
    assert first >= 0.93
    assert later >= 0.97


@pytest.mark.parametrize("observing", [0.0, 2e-3])
def test_observing_makes_no_plain_step_slower(observing: float):
    """The first answer of all: steps with drafts set the pace, of those without none was measured."""
    head = replace(states_head(chat=Kind(0.7, 1.0, 0.0, 0.0), acceptance=(0.7, 0.7)), tell=observing)
    traffic = Traffic(TWO_CORES, [head], 1, ("chat",), prompt=60, length=96, noise=0.0)
    calls = CallCost()
    for number in range(12):
        calls.observe(1 + number % 4, head.seconds(1 + number % 4, 1) + observing)
    traffic.situation.costs.begin_with_calls({head.name: calls.as_json()})
    traffic.run(MeasuredPolicy(), 90)
    costs = traffic.situation.costs
    assert costs.step_seconds(1) == pytest.approx(TWO_CORES(1), rel=0.02)
    assert costs.draft_seconds(head.name, 2) == pytest.approx(head.seconds(2, 1) + observing, rel=0.1)


def test_a_head_whose_observing_costs_more_than_it_gains_is_turned_off_within_the_first_answer():
    """By the profile it would gain: that observing takes long shows only where a text is decoded."""
    head = replace(states_head(chat=Kind(0.55, 1.0, 0.0, 0.0), acceptance=(0.6, 0.6)), tell=4e-3)
    policy, traffic = MeasuredPolicy(), Traffic(TWO_CORES, [head], 1, ("chat",), prompt=60, length=96)
    calls = CallCost()
    for number in range(12):
        calls.observe(1 + number % 4, head.seconds(1 + number % 4, 1))
    traffic.situation.costs.begin_with_calls({head.name: calls.as_json()})
    first = traffic.run(policy, 90)
    (control,) = policy.options.values()
    assert not control.is_on
    assert first.ratio > 0.85


def test_what_a_heads_maker_has_measured_is_believed_until_it_is_seen():
    """The first request of all is then guessed for as deep as the thousandth."""
    told = states_head(chat=Kind(0.85, 1.0, 0.0, 0.0), acceptance=(0.85, 0.85, 0.85, 0.85))
    untold = states_head(chat=Kind(0.85, 1.0, 0.0, 0.0))
    depths = []
    for head in (told, untold):
        policy, traffic = MeasuredPolicy(), Traffic(TWO_CORES, [head], 1, ("chat",), prompt=60)
        calls = CallCost()
        for number in range(12):
            calls.observe(1 + number % 4, head.seconds(1 + number % 4, 1))
        traffic.situation.costs.begin_with_calls({"eagle": calls.as_json()})
        traffic.run(policy, 1)
        (control,) = policy.options.values()
        depths.append(control.benefit.useful)
        assert control.is_on
    assert depths[0] > depths[1] >= 1


def test_what_a_heads_maker_has_measured_is_soon_forgotten_where_it_is_not_so():
    head = states_head(chat=Kind(0.3, 1.0, 0.0, 0.0), acceptance=(0.95, 0.95))
    policy, traffic = MeasuredPolicy(), Traffic(TWO_CORES, [head], 1, ("chat",), prompt=60)
    traffic.run(policy, 300)
    (control,) = policy.options.values()
    control.estimate.refresh(0.0)
    assert control.estimate.rates.accepted[0][0] < 0.5


def prompt_entries(traffic: Traffic, run: int) -> list[PassEntry]:
    traffic._fill()
    return [
        PassEntry(r, r.kv, len(r.tokens) - run, run, 0, True)  # type: ignore[arg-type]
        for r in traffic.running
    ]


@pytest.mark.parametrize("draws", [False, True])
def test_a_head_that_may_guess_later_reads_the_prompt_along_and_is_not_asked(draws: bool):
    head = states_head()
    traffic = Traffic(TWO_CORES, [head], 1, prompt=200)
    policy = MeasuredPolicy()
    traffic._fill()
    request: Any = traffic.running[0]
    entry = PassEntry(request, request.kv, 0, 200 if draws else 100, 0, draws)
    (plan,) = policy.plan([entry], traffic.situation)
    assert plan is not None
    assert plan.drafter is head  # type: ignore[comparison-overlap]
    assert (plan.max_nodes, plan.max_depth) == (0, 0)
    traffic.run(policy, 10)
    counts = next(iter(policy.options)).counts
    assert counts.depths[0] == 0  # no answer was expected of it while the prompt was read


def test_a_lookup_is_not_planned_for_a_chunk_that_draws_nothing():
    traffic = Traffic(TWO_CORES, [lookup()], 1, prompt=200)
    policy = MeasuredPolicy()
    traffic._fill()
    request: Any = traffic.running[0]
    assert policy.plan([PassEntry(request, request.kv, 0, 100, 0, False)], traffic.situation) == [None]


@pytest.mark.parametrize(("saved", "least", "most"), [(0.0, 0, 0), (1.0, 1, 6)])
def test_a_head_that_is_far_from_paying_reads_only_some_prompts(saved: float, least: int, most: int):
    """And none while it could not be tried behind them."""
    head = states_head(per_level=20e-3)
    traffic = Traffic(TWO_CORES, [head], 1, ("creative",), prompt=30)
    policy = MeasuredPolicy()
    traffic.run(policy, 6000)
    policy.explorer.balances[head.name] = saved
    read = []
    for _ in range(64):
        traffic.running.clear()
        traffic._fill()
        (plan,) = policy.plan(prompt_entries(traffic, 30), traffic.situation)
        read.append(plan is not None)
    assert least <= sum(read) <= most


def test_a_head_that_is_not_in_use_is_told_no_more_than_the_bank_pays_for():
    """Telling costs time at every step: more than trying it does, if it is told of every step and seldom tried."""
    head = states_head(per_level=2e-3)
    traffic = Traffic(TWO_CORES, [head], 32, ("creative",))
    policy = MeasuredPolicy()
    traffic.run(policy, 24_000)
    (control,) = policy.options.values()
    asks, spent, earning, told = (
        control.estimate.requests,
        policy.explorer.spent,
        policy.explorer.earned_from,
        0,
    )
    for _ in range(400):
        traffic.run(policy, 1)
        told += sum(policy.notifies(request) for request in traffic.running)  # type: ignore[arg-type]
    tried = control.estimate.requests - asks
    assert tried, "it is tried all the same"
    assert told <= 3 * OBSERVED_BEFORE * tried, "for a few steps each time"
    assert told * policy.settings.probe_host_seconds < policy.explorer.spent - spent, "and that is paid"
    share = policy.settings.idle_probe_share
    assert (
        policy.explorer.spent - spent
        <= share * (policy.explorer.earned_from - earning) + 2 * policy.settings.probe_saved_seconds
    )


def test_a_head_that_was_told_nothing_hears_the_newest_token_before_it_is_asked():
    head = states_head(chat=Kind(0.8))
    traffic = Traffic(TWO_CORES, [head], 1, ("chat",))
    policy = MeasuredPolicy(ControlSettings(reference_share=0.0))
    traffic.run(policy, 2000)
    traffic._fill()
    request: Any = traffic.running[0]
    policy._states[request.request_id].is_observed = False
    (first,) = policy.plan([traffic._entry(request)], traffic.situation)
    assert first is not None
    assert first.max_nodes == 0
    traffic.run(policy, 1)
    assert policy.notifies(request)
    (second,) = policy.plan([traffic._entry(request)], traffic.situation)
    assert second is None or second.max_nodes > 0


def test_a_step_with_a_prompt_in_it_is_no_reason_to_give_guessing_up():
    head = states_head(chat=Kind(0.8))
    traffic = Traffic(DEAR_PROMPTS, [head], 1, ("chat",))
    policy = MeasuredPolicy()
    traffic.run(policy, 2000)
    (control,) = policy.options.values()
    assert control.is_on
    policy.reference.left = 0
    decoding = traffic._entry(traffic.running[0])
    other = Traffic(DEAR_PROMPTS, [head], 1, ("chat",), seed=7, prompt=500)
    other._fill()
    reading: Any = other.running[0]
    chunk = PassEntry(reading, reading.kv, 0, 400, 0, False)
    policy.plan([decoding, chunk], traffic.situation)
    assert control.is_on
    assert any(policy.plan([decoding], traffic.situation)[0] is not None for _ in range(9))


def test_a_drafter_is_told_how_far_behind_it_is():
    drafter = lookup(code=Kind(0.05, 0.5))
    traffic = Traffic(TWO_CORES, [drafter], 1, ("code",))
    policy = MeasuredPolicy()
    traffic.run(policy, 400)
    behind = []
    for _ in range(300):
        traffic._fill()
        before = len(traffic.running[0].tokens)
        (plan,) = policy.plan([traffic._entry(traffic.running[0])], traffic.situation)
        if plan is not None:
            behind.append((plan.lag, before - traffic.running[0].last_asked.get(plan.method, 0)))
        traffic.run(policy, 1)
    assert len(behind) > 3
    assert all(told == missed for told, missed in behind)


def test_costs_of_a_drafter_that_is_only_tried_now_and_then_are_those_of_use():
    """What it takes to catch up is not taken for what a level costs, so that it is used again when it pays."""
    head = states_head(chat=Kind(0.05))
    traffic = Traffic(TWO_CORES, [head], 1, ("chat",), seed=3)
    policy = MeasuredPolicy()
    traffic.run(policy, 6000)
    (control,) = policy.options.values()
    assert not control.is_on
    expected = traffic.situation.costs.draft_seconds("eagle", 4)
    assert expected == pytest.approx(head.seconds(4, 1), rel=0.3)


def settled_depth(policy: MeasuredPolicy) -> int:
    (control,) = policy.options.values()
    assert control.is_on
    return control.benefit.useful


def test_a_depth_that_once_looked_dear_is_looked_at_again():
    """Passes of three rows took long for a while; nobody would ever know that they don't if none were made."""
    head = states_head(chat=Kind(0.75, 1.0, 0.1, 0.1))
    traffic = Traffic(TWO_CORES, [head], 1, ("chat",))
    policy = MeasuredPolicy()
    traffic.run(policy, 3000)
    usual = settled_depth(policy)
    assert usual >= 2
    for curve in traffic.situation.costs._decoding:
        for rows, bucket in curve._sizes.items():
            bucket.seconds *= 1.6 if rows > 2 else 1.0
    policy.decisions.evaluate_again()
    traffic.run(policy, 1)
    assert settled_depth(policy) == 1
    traffic.run(policy, 6000)
    assert settled_depth(policy) >= usual - 1 >= 1
    assert traffic.situation.costs.step_seconds(3) == pytest.approx(TWO_CORES(3), rel=0.1)


def test_pauses_say_nothing_of_rows():
    curve = CostCurve()
    curve.begin_with([(rows, TWO_CORES(rows)) for rows in (1, 2, 3, 4)])
    for _ in range(50):
        curve.observe(2, TWO_CORES(2))
    for _ in range(3):
        curve.observe(3, 4 * TWO_CORES(3))
        for _ in range(30):
            curve.observe(2, TWO_CORES(2))
    longer, usual = curve.seconds(3), curve.seconds(2)
    assert longer is not None
    assert usual is not None
    assert longer / usual < 1.15 * TWO_CORES(3) / TWO_CORES(2)


def test_where_some_prompt_is_always_being_read_guessing_is_given_up_all_the_same():
    """By what it would bring without the prompt: eight requests leave no row that is free."""
    head = states_head(chat=Kind(0.6))
    traffic = Traffic(TWO_CORES, [head], 1, ("chat",))
    policy = MeasuredPolicy()
    traffic.run(policy, 2000)
    (control,) = policy.options.values()
    assert control.is_on
    many = Traffic(TWO_CORES, [head], 8, ("chat",), seed=9)
    many._fill()
    late = Traffic(TWO_CORES, [head], 1, ("chat",), seed=11, prompt=400)
    late._fill()
    reading: Any = late.running[0]
    entries = [*map(many._entry, many.running), PassEntry(reading, reading.kv, 0, 60, 0, False)]
    plans = policy.plan(entries, traffic.situation)
    assert not control.is_on
    assert not any(plan is not None and plan.max_nodes for plan in plans)


def test_trying_a_head_that_loses_costs_what_the_bank_pays_for_it():
    """Four tenants, none of whom anything is known of, at a batch where the fifth row of a pass is dear."""
    head = states_head(acceptance=(0.64, 0.59), chat=Kind(0.62, 0.99, 0.3, 0.3))
    traffic = Traffic(TWO_CORES, [head], 4, ("chat",), prompt=60, length=96, has_own_tenants=True)
    calls = CallCost()
    for number in range(12):
        calls.observe(1 + number % 4, head.seconds(1 + number % 4, 1))
    traffic.situation.costs.begin_with_calls({"eagle": calls.as_json()})
    policy = MeasuredPolicy()
    traffic.run(policy, 2400)
    ratio = traffic.run(policy, 8000).ratio
    assert ratio >= 0.989
    assert 1 - ratio <= 1.3 * policy.explorer.share + 0.003


def test_a_head_reads_prompts_of_every_cohort_that_uses_it():
    """Requests of two cohorts take turns: the newest decision knows only the other one's."""
    head = states_head(chat=Kind(0.8), code=Kind(0.8))
    traffic = Traffic(TWO_CORES, [head], 1, ("chat", "code"), prompt=40, length=30)
    policy = MeasuredPolicy(ControlSettings(reference_share=0.0))
    traffic.run(policy, 1500)
    assert len(policy.options) == 2 and all(option.is_on for option in policy.options.values())
    for _ in range(200):
        traffic.run(policy, 1)
        assert all("eagle" in request.readers for request in traffic.running if request.is_read)
