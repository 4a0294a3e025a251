"""The measured policy on scripted traffic: near an oracle, and never far below plain decoding."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from foreword.acceptance.rules.rule import Rule
from foreword.acceptance.rules.trees import Drawn
from foreword.control import decision
from foreword.control.acceptance import MAX_ESTIMATES, Estimates
from foreword.control.decision import Evaluation
from foreword.control.policy import FEW_STATES, MeasuredPolicy
from foreword.control.requests import DraftInFlight, RequestState
from foreword.control.settings import ControlSettings
from foreword.control.value import Benefit, Pass
from foreword.speculation.draft import Draft
from foreword.speculation.requests import DraftPlan, PassEntry
from helpers.pending_drafts import left_pending
from helpers.traffic import (
    CPU,
    H200,
    LENGTH,
    Kind,
    Oracle,
    PretendDrafter,
    PretendRequest,
    Traffic,
    head,
    lookup,
    states_head,
)

WARM = 2500

SCENARIOS = [
    (CPU, lookup, 1),
    (CPU, lookup, 4),
    (H200, head, 1),
    (H200, lookup, 8),
    *(
        pytest.param(curve, drafter, batch, marks=pytest.mark.slow)
        for curve, drafter, batch in [
            (CPU, lookup, 16),
            (H200, head, 8),
            (H200, head, 32),
            (H200, lookup, 32),
            (H200, lambda: head(2.6e-3), 32),
        ]
    ),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("curve", "drafter", "batch"), SCENARIOS)
def test_the_policy_is_near_an_oracle_before_and_after_the_traffic_changes(
    curve: Callable[[int], float], drafter: Callable[[], PretendDrafter], batch: int
):
    """Which knows how likely every guess is, and what everything costs."""
    ratios = []
    for make in (lambda traffic: MeasuredPolicy(), Oracle):
        traffic = Traffic(curve, [drafter()], batch)
        policy: Any = make(traffic)
        traffic.run(policy, WARM + 100 * batch)
        mixed = traffic.run(policy, 1500 + 200 * batch).ratio
        traffic.cohorts = ("chat",)
        ratios.append((mixed, traffic.run(policy, 1500 + 200 * batch).ratio))
    (mixed, changed), (best_mixed, best_changed) = ratios
    assert mixed >= 0.96 * best_mixed
    assert changed >= 0.96 * best_changed
    assert min(mixed, changed) >= 0.99


def test_it_leaves_off_soon_and_begins_again_when_guessing_pays_again():
    drafter = lookup(good=Kind(0.9, 0.8), bad=Kind(0.1, 0.5))
    traffic = Traffic(CPU, [drafter], 2, cohorts=("good",))
    policy = MeasuredPolicy()
    traffic.run(policy, 2000)
    assert traffic.run(policy, 2000).ratio > 1.1
    for request in traffic.running:
        request.cohort = "good"  # the same cohort, other texts
    worse = replace(drafter, kinds={**drafter.kinds, "good": drafter.kinds["bad"]})
    _use(traffic, worse)
    assert _seconds_until(traffic, policy, lambda: not any(c.is_on for c in policy.options.values())) < 3
    _use(traffic, drafter)
    assert _seconds_until(traffic, policy, lambda: any(c.is_on for c in policy.options.values())) < 10
    assert policy.explorer.share <= 0.01


def test_a_drafter_that_becomes_ten_times_as_slow_is_left():
    drafter = replace(head(), name="head")
    traffic = Traffic(H200, [drafter], 4)
    policy = MeasuredPolicy()
    traffic.run(policy, 3000)
    assert any(control.is_on for control in policy.options.values())
    _use(traffic, replace(drafter, level=10 * drafter.level))
    assert _seconds_until(traffic, policy, lambda: not any(c.is_on for c in policy.options.values())) < 3


NO_LOOKS = ControlSettings(decision_steps=1_000_000, decision_seconds=1e9)


@pytest.mark.parametrize("seed", [1, 4, 9])
def test_a_drafter_that_becomes_slow_is_looked_at_before_it_is_time(seed: int):
    """And looked at closely: at first it is believed to be only a little slower."""
    drafter = head()
    traffic, policy = Traffic(H200, [drafter], 1, cohorts=("code",), seed=seed), MeasuredPolicy()
    traffic.run(policy, 2000)
    policy.use(NO_LOOKS)
    (control,) = policy.options.values()
    traffic.run(policy, 2000)
    assert control.is_on
    _use(traffic, replace(drafter, level=10 * drafter.level))
    assert _seconds_until(traffic, policy, lambda: not control.is_on) < 1


def test_what_was_decided_of_a_cohort_long_ago_is_decided_again_when_it_comes_back():
    drafter = head()
    traffic, policy = Traffic(H200, [drafter], 1, cohorts=("code",)), MeasuredPolicy()
    traffic.run(policy, 1000)
    (code,) = policy.options.values()
    traffic.running, traffic.cohorts = [], ("chat",)
    traffic.run(policy, 1000)
    chat = next(control for control in policy.options.values() if control is not code)
    assert code.is_on and chat.is_on
    policy.use(replace(NO_LOOKS, decision_seconds=1.0))
    _use(traffic, replace(drafter, level=20 * drafter.level))
    _seconds_until(traffic, policy, lambda: not chat.is_on)
    traffic.run(policy, 200)
    assert code.is_on
    traffic.running, traffic.cohorts = [], ("code",)
    traffic._fill()
    policy.plan(entries_of(traffic.running), traffic.situation)
    assert not code.is_on


def test_what_a_level_costs_is_known_after_a_few_asks():
    """Else the first depth would be asked for ever: nothing tells that fewer levels cost less."""
    traffic = Traffic(H200, [head()], 1)
    policy = MeasuredPolicy()
    traffic.run(policy, 40)
    costs = traffic.situation.costs
    for levels in (1, 8):
        assert costs.draft_seconds("head", levels) == pytest.approx(head().seconds(levels, 1), rel=0.15)
    (control,) = policy.options.values()
    assert 1 < control.benefit.depth < 6


def _use(traffic: Traffic, drafter: PretendDrafter) -> None:
    traffic.drafters = [drafter]
    for request in traffic.running:
        request.drafters = {drafter.name: drafter}


def _seconds_until(traffic: Traffic, policy: MeasuredPolicy, done: Callable[[], bool]) -> float:
    spent = 0.0
    while not done():
        spent += traffic.run(policy, 1).seconds
        assert spent < 60
    return spent


def test_of_two_drafters_each_cohort_gets_the_one_that_suits_it():
    one = PretendDrafter("one", {"code": Kind(0.9), "chat": Kind(0.2)}, call=0.2e-3)
    another = PretendDrafter("another", {"code": Kind(0.2), "chat": Kind(0.85)}, call=0.2e-3)
    traffic = Traffic(H200, [one, another], 6, cohorts=("code", "chat"))
    policy = MeasuredPolicy()
    traffic.run(policy, 6000)
    asked: dict[str, list[str]] = {"code": [], "chat": []}
    for _ in range(50):
        entries = entries_of(traffic.running)
        for entry, plan in zip(entries, policy.plan(entries, traffic.situation), strict=True):
            if plan is not None:
                asked[entry.request.cohort].append(plan.method)
        traffic.run(policy, 1)
    assert asked["code"].count("one") > 0.8 * len(asked["code"]) > 20
    assert asked["chat"].count("another") > 0.8 * len(asked["chat"]) > 20


def entries_of(requests: list[PretendRequest]) -> list[PassEntry]:
    return [PassEntry(r, r.kv, len(r.tokens), 1, 0, True) for r in requests]  # type: ignore[arg-type]


def random_tree(rng: random.Random, place: int, nodes: int) -> Draft:
    parents = [rng.randint(-1, node - 1) for node in range(nodes)]
    return Draft(tuple(rng.randrange(5) for _ in parents), tuple(parents), place)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_kept_is_a_tree_within_the_draft_however_the_batch_is_ordered(seed: int):
    rng = random.Random(seed)
    traffic = Traffic(rng.choice((CPU, H200)), [lookup()], rng.randint(1, 8), seed=seed)
    policy = MeasuredPolicy(ControlSettings(reference_share=0.0))
    traffic.run(policy, 800)
    traffic._fill()
    entries = entries_of(traffic.running)
    drafts = [random_tree(rng, len(e.request.tokens), rng.randint(0, 12)) for e in entries]

    def kept(order: list[int], drafts: Sequence[Draft]) -> dict[int, Draft]:
        chosen = [entries[place] for place in order]
        plans = policy.plan(chosen, traffic.situation)
        assert len(plans) == len(chosen)
        for entry, plan in zip(chosen, plans, strict=True):
            state = policy._states[entry.request.request_id]
            arm = state.arms[0]
            state.flight = None if plan is None else DraftInFlight(arm, 8, arm.option.benefit)
        trimmed = policy.trim(chosen, [drafts[place] for place in order], traffic.situation)
        return dict(zip(order, trimmed, strict=True))

    policy.explorer.balances = dict.fromkeys(policy.explorer.balances, -1.0)
    order = list(range(len(entries)))
    first = kept(order, drafts)
    rng.shuffle(order)
    assert kept(order, drafts) == first
    unread = left_pending(drafts)
    found = kept(order, unread)
    assert not unread[0].device.source.was_read, "on a device, they are trimmed before anybody knows them"
    assert {place: draft.tokens for place, draft in found.items()} == {p: d.tokens for p, d in first.items()}
    for place, draft in first.items():
        whole = {whole_path(drafts[place], node) for node in range(len(drafts[place]))}
        assert {whole_path(draft, node) for node in range(len(draft))} <= whole


def whole_path(draft: Draft, node: int) -> tuple[int, ...]:
    path: list[int] = []
    while node >= 0:
        path.append(draft.tokens[node])
        node = draft.parents[node]
    return tuple(reversed(path))


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_what_was_drawn_is_not_cut_when_it_is_known(rule: Rule):
    """Only what was fixed before: how deep was asked."""
    import numpy as np

    traffic = Traffic(CPU, [lookup()], 4)
    policy = MeasuredPolicy()
    traffic.run(policy, 500)
    traffic._fill()
    for request in traffic.running:
        request.sampler = SimpleNamespace(rule=rule)
    policy._states.clear()
    entries = entries_of(traffic.running)
    policy.plan(entries, traffic.situation)
    q = Drawn(np.array([1, 2]), np.array([0.5, 0.5]))
    drafts = [Draft.chain([1, 2, 1], len(e.request.tokens), drawn=[q] * 3) for e in entries]
    for entry in entries:
        state = policy._states[entry.request.request_id]
        state.flight = DraftInFlight(state.arms[0], 3, state.arms[0].option.benefit)
    assert list(policy.trim(entries, drafts, traffic.situation)) == drafts


def test_plain_windows_are_plain_and_make_the_reference():
    traffic = Traffic(H200, [head()], 4)
    policy = MeasuredPolicy(ControlSettings(reference_share=0.2, sure_reference=0.5))
    traffic.run(policy, 2000)
    plain_steps = passes = 0
    for _ in range(400):
        before = policy.reference.passes
        entries = entries_of(traffic.running)
        left = policy.reference.left
        is_plain = all(plan is None for plan in policy.plan(entries, traffic.situation))
        if left:
            assert is_plain
        plain_steps += is_plain
        traffic.run(policy, 1)
        passes += policy.reference.passes - before
    assert 40 < plain_steps < 160
    assert passes > 20


def test_plain_windows_are_as_short_as_they_are_meant_to_be():
    """Nothing goes on in them, and yet they are no time to look away."""
    settings = ControlSettings(reference_share=0.1, sure_reference=1.0)
    traffic = Traffic(CPU, [lookup(code=Kind(0.9, 0.9))], 1, ("code",))
    policy = MeasuredPolicy(settings)
    traffic.run(policy, 2000)
    began = []
    for _ in range(600):
        before = policy.reference.left
        traffic.run(policy, 1)
        if policy.reference.left == settings.reference_window - 1 and before == 0:
            began.append(policy.steps)
        assert not before or policy.reference.left == before - 1
    assert len(began) > 3


def test_a_fixed_plan_is_done_as_it_stands_and_a_bound_is_a_bound():
    traffic = Traffic(H200, [head()], 3)
    policy = MeasuredPolicy()
    traffic.run(policy, 3000)
    drafter: Any = SimpleNamespace()
    fixed = DraftPlan("fixed", drafter, 3, 3, is_fixed=True)
    shallow = replace(traffic.running[1].speculation, max_depth=1)  # type: ignore[type-var]
    traffic.running[0].speculation = fixed
    traffic.running[1].speculation = shallow
    traffic.running[2].speculation = None
    policy._states.clear()
    for _ in range(30):
        plans = policy.plan(entries_of(traffic.running), traffic.situation)
        assert plans[0] is fixed
        assert plans[1] is None or plans[1].max_depth == 1
        assert plans[2] is None


def test_a_cohort_of_one_tenant_says_nothing_of_anothers():
    policy = MeasuredPolicy()
    mine, theirs = (policy.estimates.of("ngram", tenant, "greedy") for tenant in ("me", "they"))
    for _ in range(300):
        mine.counts.count_level(0, 1, 0)
        mine.finished(1, mine.rates.expected[0])
        theirs.counts.count_level(0, 1, None)
        theirs.finished(0, theirs.rates.expected[0])
        for pair in (mine, theirs):
            pair.refresh(0.0)
    assert mine.rates.accepted[0][0] > 0.85
    assert theirs.rates.accepted[0][0] < 0.15


def test_a_stream_of_new_tenants_leaves_a_bounded_number_of_pairs():
    estimates = Estimates()
    pairs = [estimates.of("ngram", f"tenant {number}", "greedy") for number in range(3 * MAX_ESTIMATES)]
    assert list(estimates.known.values()) == pairs[-MAX_ESTIMATES:]
    for number in range(3 * MAX_ESTIMATES):
        estimates.of(f"drafter {number}", "", "greedy")
    assert len(estimates.drafters) <= MAX_ESTIMATES


def test_what_is_kept_of_requests_goes_with_them():
    traffic = Traffic(CPU, [lookup()], 3)
    traffic.length = 8
    policy = MeasuredPolicy()
    traffic.run(policy, 6000)
    assert len(policy._states) <= FEW_STATES
    assert all(request.request_id in policy._states for request in traffic.running)


def test_where_the_gain_is_beyond_doubt_plain_windows_are_rare_and_come_back_when_it_falls():
    drafter = replace(head(), kinds={"code": Kind(0.85, 1.0, 0.1, 0.1)})
    traffic = Traffic(H200, [drafter], 2, cohorts=("code",))
    policy = MeasuredPolicy()
    traffic.run(policy, 500)
    assert policy.decision.plain_share >= 0.005  # nothing was measured yet
    traffic.run(policy, 12_000)
    assert policy.decision.plain_share == pytest.approx(0.001)
    _use(traffic, replace(drafter, kinds={"code": Kind(0.05, 1.0, 0.1, 0.1)}))
    traffic.run(policy, 4000)
    assert policy.decision.plain_share in (0.0, 0.01)


def _decisions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, set[str]]]:
    """Rows and cohorts of the passes that something is decided of, from now on."""
    found: list[tuple[int, set[str]]] = []

    class Noted(Evaluation):
        def __init__(self, states: Sequence[RequestState | None], here: Pass, *others: Any) -> None:
            cohorts = {arm.option.estimate.cohort for state in states if state for arm in state.arms}
            found.append((here.rows, cohorts))
            super().__init__(states, here, *others)

    monkeypatch.setattr(decision, "Evaluation", Noted)
    return found


def test_nothing_is_decided_while_prompts_are_read(monkeypatch: pytest.MonkeyPatch):
    """What was decided of the passes before holds again behind one: a look at everything is not for free."""
    traffic = Traffic(CPU, [states_head()], 1, ("chat",), prompt=40, length=20)
    policy = MeasuredPolicy()
    traffic.run(policy, 400)
    decided = _decisions(monkeypatch)
    traffic.run(policy, 800)  # of forty requests
    assert {rows for rows, _ in decided} == {1}
    assert len(decided) < 20


def test_requests_of_another_cohort_are_looked_at_at_once(monkeypatch: pytest.MonkeyPatch):
    """Also where they take the place of others in a batch of the same size, and were looked at a moment ago."""
    traffic = Traffic(CPU, [states_head()], 1, ("chat", "code"), prompt=40, length=20)
    decided, policy, came = _decisions(monkeypatch), MeasuredPolicy(), [""]
    for _ in range(300):
        traffic.run(policy, 1)
        came += [request.cohort for request in traffic.running]
    looked = [cohort for _, cohorts in decided for cohort in cohorts]
    assert [one for before, one in pairwise(["", *looked]) if one != before] == [
        one for before, one in pairwise(came) if one != before
    ]


def test_what_was_decided_of_passes_without_prompts_holds_again_behind_one(monkeypatch: pytest.MonkeyPatch):
    """And the other way round: a look at everything is not for free, and prompts come all the time."""
    traffic = Traffic(CPU, [states_head()], 2, ("chat",))
    policy = MeasuredPolicy()
    traffic.run(policy, 600)
    traffic._fill()
    reading = PretendRequest(1, "chat", traffic.drafters, prompt=200)
    reading.speculation = traffic._plan(reading)
    decided = _decisions(monkeypatch)

    def benefit_in(*requests: PretendRequest) -> Benefit:
        policy.plan([traffic._entry(request) for request in requests], traffic.situation)
        assert policy.decision is not None
        (benefit,) = policy.decision.benefits.values()
        return benefit

    benefit_in(*traffic.running)
    policy.decisions.evaluate_again()
    decided.clear()
    alone = benefit_in(*traffic.running)
    beside = benefit_in(*traffic.running, reading)
    assert alone != beside
    for _ in range(3):
        assert benefit_in(*traffic.running) == alone
        assert benefit_in(*traffic.running, reading) == beside
    assert len(decided) == 2
    assert benefit_in(*traffic.running) == alone
    policy.steps += 1000  # time to look again, at the other kind first, of which nothing is new
    assert benefit_in(*traffic.running, reading) == beside
    assert benefit_in(*traffic.running) == alone
    assert len(decided) == 4


def test_a_fixed_request_beside_others_says_nothing_of_what_they_gain():
    """The guard would hold their drafter for minutes for what another request's drafter takes."""
    good = PretendDrafter("good", {"code": Kind(0.85, spread=0.0, mood=0.0)}, level=0.1e-3, depth=5)
    bad = PretendDrafter("bad", {"code": Kind(0.02, spread=0.0, mood=0.0)}, level=3e-3, depth=5)
    is_fixed_there = False

    def plan_of(request: PretendRequest) -> DraftPlan:
        others = [other.speculation for other in traffic.running]
        if is_fixed_there and not any(plan is not None and plan.is_fixed for plan in others):
            return DraftPlan("bad", bad, 5, 5, is_fixed=True)  # type: ignore[arg-type]
        return DraftPlan("good", good, 5, 5)  # type: ignore[arg-type]

    traffic = Traffic(H200, [good, bad], 4, ("code",), plan_of=plan_of)
    policy = MeasuredPolicy()
    policy.reference.passes = 1000
    traffic.run(policy, 6000)
    (control,) = policy.options.values()
    known = control.guard.gain.bounds()
    assert known is not None and known[0] > 2
    is_fixed_there, traffic.running = True, []
    traffic.run(policy, 6000)
    assert control.is_on and not control.guard.trips
    assert control.guard.gain.bounds() == known


@pytest.mark.parametrize(("batch", "prompt"), [(4, 2), (16, 3), (32, 4), (32, 200)])
def test_a_cohort_that_joins_is_decided_of_behind_its_prompt(batch: int, prompt: int):
    """Also where the last rows of its prompt are few beside the others'."""
    traffic = Traffic(H200, [states_head()], batch, ("code",), prompt=prompt, seed=1)
    policy = MeasuredPolicy()
    traffic.run(policy, 40 * batch)
    joins = PretendRequest(999_999, "extract", traffic.drafters, "another", prompt)
    joins.speculation = traffic._plan(joins)
    traffic._fill()
    for request in traffic.running:
        request.length = LENGTH
    traffic.running[-1] = joins
    asked = [traffic._step(policy).requests[-1].called for _ in range(3)]
    assert any(asked)


def test_what_is_decided_holds_no_longer_than_it_may():
    """Whether or not the batch has become a little smaller since."""
    policy = MeasuredPolicy(ControlSettings(decision_steps=1000, decision_seconds=1.0))
    traffic = Traffic(H200, [states_head()], 32, ("code",))
    traffic.run(policy, 3200)
    traffic._fill()
    entries = [traffic._entry(request) for request in traffic.running]
    for count in (32, 31):
        policy.plan(entries[:count], traffic.situation)
        decision = policy.decision
        assert decision is not None
        policy.plan(entries[:count], traffic.situation)
        assert policy.decision is decision
        policy.seconds += 2.1 if decision.is_settled else 1.1
        policy.plan(entries[:count], traffic.situation)
        assert policy.decision is not decision
