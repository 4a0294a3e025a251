"""Drafters that say how sure they are: rows for guesses that are worth them, drafts that end where they should."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from foreword.acceptance.rules.rule import Rule
from foreword.acceptance.rules.trees import Drawn
from foreword.control.acceptance import Estimate, Estimates
from foreword.control.counts import DraftCounts
from foreword.control.judging import Comparison, RequestFit
from foreword.control.options import Option
from foreword.control.policy import MeasuredPolicy
from foreword.control.rates import Rates
from foreword.control.requests import Arm, DraftInFlight, RequestState
from foreword.control.trim import trimmed
from foreword.control.value import Benefit, Group, Pass, best_plan, worked_levels
from foreword.speculation.confidence import CLASSES, EDGES, MIDDLES, Stop, class_of
from foreword.speculation.draft import NO_DRAFT, Draft
from foreword.speculation.drafting import Drafter
from foreword.speculation.report import RequestReport
from foreword.speculation.requests import DraftPlan
from helpers.traffic import NO_NEEDS, TWO_CORES, Kind, PretendDrafter, Traffic, lookup, states_head

SURE, UNSURE = 0.97, 0.1


def pair() -> Estimate:
    found = Estimates().of("head", "", "greedy", coverage=1.0)
    found.need(4)
    return found


def ratio(drafter: PretendDrafter, batch: int, cohort: str, seed: int = 0) -> float:
    traffic, policy = Traffic(TWO_CORES, [drafter], batch, cohorts=(cohort,), seed=seed), MeasuredPolicy()
    traffic.run(policy, 2000)
    return traffic.run(policy, 4000).ratio


def test_classes_hold_what_lies_between_their_edges():
    assert class_of(float("nan")) == 0
    assert [class_of(middle) for middle in MIDDLES] == list(range(CLASSES))
    assert [class_of(edge) for edge in EDGES] == list(range(1, CLASSES))
    assert (class_of(0.0), class_of(1.0)) == (0, CLASSES - 1)


@pytest.mark.parametrize(
    ("batch", "cohort"),
    [
        (1, "code"),
        (2, "chat"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, "chat"), (2, "code"))),
    ],
)
def test_a_head_that_stops_where_it_is_unsure_is_faster(batch: int, cohort: str):
    """By 2 to 6% here; without what it says the same guesses are verified, right or wrong."""
    head = replace(states_head(0.35e-3), knows=2.0, needs=NO_NEEDS)
    assert ratio(replace(head, stops=True), batch, cohort) > 1.015 * ratio(
        replace(head, says=False), batch, cohort
    )


def test_rows_go_to_guesses_that_a_lookup_is_sure_of():
    """At batch 4 its guesses do not pay on average; those that it is sure of do."""
    drafter = replace(lookup(), knows=2.0, depth=4)
    assert ratio(replace(drafter, says=False), 4, "code", seed=1) < 1.0
    assert ratio(drafter, 4, "code", seed=1) > 1.01


@pytest.mark.parametrize("batch", [4, 8])
@pytest.mark.parametrize("seed", [0, 1])
def test_where_guessing_does_not_pay_saying_more_costs_nothing(batch: int, seed: int):
    head = replace(states_head(0.35e-3), knows=2.0, needs=NO_NEEDS, stops=True)
    assert ratio(head, batch, "chat", seed) >= 0.985


def test_what_a_class_is_worth_is_learned_from_the_text():
    found = pair()
    fit = RequestFit(found)
    for number in range(200):
        is_right = number % 4 == 0
        draft = Draft.chain([1, 2], 0, confidence=[SURE, UNSURE])
        found.requested(2, 2)
        assert Comparison(fit, draft, requested=2, useful=2).follow([1 if is_right else 9, 2, 3])
    found.refresh(0.0)
    assert found.rates.by_class[class_of(SURE)] == pytest.approx(0.25, abs=0.05)  # however sure it is
    assert found.rates.by_class[class_of(UNSURE)] == pytest.approx(1.0, abs=0.1)
    others = [sure for sure in range(CLASSES) if sure not in (class_of(SURE), class_of(UNSURE))]
    assert all(found.rates.by_class[sure] == pytest.approx(MIDDLES[sure]) for sure in others)


def test_levels_are_counted_as_far_as_they_were_worth_verifying():
    """The others are known by their class alone: they would make the levels in use look worse than they are."""
    found = pair()
    fit = RequestFit(found)
    draft = Draft.chain([1, 2, 3], 0, confidence=[SURE, UNSURE, UNSURE])
    Comparison(fit, draft, requested=4, useful=1).follow([1, 7, 8, 9, 9])
    counts = found.counts
    assert counts.reached[0] == counts.accepted[0] > 0
    assert sum(counts.reached[1:]) == 0
    assert counts.ended[1] > 0 and sum(counts.ended) == counts.ended[1]
    assert counts.class_reached[class_of(UNSURE)] == counts.class_reached[class_of(SURE)] > 0
    assert counts.class_accepted[class_of(UNSURE)] == 0


@pytest.mark.parametrize(("text", "ended"), [([1, 2, 9], 1), ([1, 9, 9], 0), ([9, 9, 9], 0)])
def test_a_draft_ends_too_early_only_where_all_of_it_was_right(text: list[int], ended: int):
    found = pair()
    Comparison(RequestFit(found), Draft.chain([1, 2], 0), requested=4, useful=2).follow(text)
    assert sum(count > 0 for count in found.counts.ended) == ended


@pytest.mark.parametrize("requested", [4, 2])
def test_a_tree_ends_where_the_text_leaves_it_through_a_leaf(requested: int):
    found = pair()
    tree = Draft((1, 2, 3), (-1, -1, 1), 0)
    Comparison(RequestFit(found), tree, requested, useful=2).follow([1, 9, 9])
    assert [level for level, count in enumerate(found.counts.ended) if count] == [1]


@pytest.mark.parametrize(("accepted", "asked", "ended"), [(2, 4, [2]), (2, 2, []), (1, 4, [])])
def test_other_rules_tell_of_classes_and_ends_as_well(accepted: int, asked: int, ended: list[int]):
    found = pair()
    draft = Draft.chain([1, 2], 0, confidence=[SURE, UNSURE])
    Comparison(RequestFit(found), draft, requested=asked, useful=2).judge(accepted, 2)
    counts = found.counts
    assert [level for level, count in enumerate(counts.ended) if count] == ended
    assert counts.class_reached[class_of(SURE)] == counts.class_accepted[class_of(SURE)] > 0
    assert (counts.class_accepted[class_of(UNSURE)] > 0) == (accepted == 2)


def test_where_one_cohorts_drafts_end_says_little_of_others():
    """However many there were: at most as many as a cohort's other drafts best_plan."""
    counts = DraftCounts()
    for _ in range(600):
        counts.count_request(4, 3, 3)
        for level in range(3):
            counts.count_level(level, 1, 0)
        counts.count_end(3)
    share = DraftCounts()
    share.add_share(counts, 20.0, 1.0)
    assert max(share.ended) <= 20.0
    assert max(share.reached) <= 20.0


@pytest.mark.parametrize("trial", [0, 2])
def test_what_was_drawn_under_other_rules_is_never_cut_by_how_sure_it_is(trial: int):
    estimate = pair()
    benefit, control = Benefit(depth=2, useful=2, least=(0.5, 0.5)), Option(estimate)
    arm = Arm(DraftPlan("head", Drafter(), 4, 4), control, RequestFit(estimate))
    request: Any = SimpleNamespace(request_id=1, step_limit=None)
    q = Drawn(np.array([1, 2]), np.array([0.9, 0.1]))
    entry: Any = SimpleNamespace(request=request)
    kept = []
    for tokens in ([1, 2], [2, 1]):
        record = RequestState("head", [arm], False, lambda: request)
        record.flight = DraftInFlight(arm, 2, benefit, verified=trial)
        sure = [0.9 if token == 1 else 0.1 for token in tokens]
        draft = Draft.chain(tokens, 0, drawn=[q, q], confidence=sure)
        kept.append(
            trimmed([entry, entry], [draft, NO_DRAFT], {1: record}, Pass.of(2, 2, [1.0] * 9))[0].tokens
        )
    assert kept == [(1, 2), (2, 1)]


def test_a_head_that_says_nothing_of_a_request_is_not_taken_to_stop():
    """A grammar's masks are not in a chain's call: it is asked for as deep as is worth it on average then."""
    estimate = pair()
    arm = Arm(DraftPlan("head", Drafter(), 4, 4), Option(estimate), RequestFit(estimate), is_stopping=True)
    request: Any = SimpleNamespace(request_id=1, step_limit=None)
    entry: Any = SimpleNamespace(request=request)
    for sure, is_stopping in (([0.5], True), ([], False)):
        record = RequestState("head", [arm], True, lambda: request)
        record.flight = DraftInFlight(arm, 2, Benefit())
        trimmed([entry], [Draft.chain([1], 0, confidence=sure)], {1: record}, Pass.of(1, 1, [1.0] * 9))
        assert arm.is_stopping is is_stopping


def test_what_ended_early_brings_nothing_behind_its_end():
    always = Rates([[0.8]] * 3, [1.0] * 3)
    often = Rates([[0.8]] * 3, [1.0, 0.6, 0.5], presence=[1.0, 0.5, 1.0])
    assert always.gains(0) == pytest.approx([0.8, 0.64, 0.512])
    assert often.gains(0) == pytest.approx([0.8, 0.32, 0.256])


def test_a_level_is_accepted_at_most_as_often_as_there_is_one():
    """That drafts end is known from all of them, and presence only from those that were accepted so far."""
    seldom = Rates([[0.9]] * 3, [0.5, 0.1, 0.02], presence=[1.0, 0.9, 0.9])
    for shift in (-5, 0, 5):
        gains = seldom.gains(shift)
        assert all(gain <= share for gain, share in zip(gains, seldom.coverage, strict=True))
    assert seldom.gains(0) == pytest.approx([0.45, 0.1, 0.02])


def test_a_draft_without_a_stop_counts_as_deep_as_the_heads_own_stop_lets_it_be():
    """Deeper levels count by confidence: of drafts in use, none has them."""
    head = replace(states_head(0.35e-3, chat=Kind(0.5, 1, 0, 0)), knows=2.0, needs=NO_NEEDS, stops=True)
    traffic, policy = Traffic(TWO_CORES, [head], 1, cohorts=("chat",)), MeasuredPolicy()
    unstopped: list[DraftInFlight] = []
    judge = policy._judge

    def judged(state: RequestState, flight: DraftInFlight, part: RequestReport) -> None:
        unstopped.extend([flight] if not flight.stops and len(flight.draft) else [])
        before = list(flight.arm.fit.estimate.counts.depths)
        judge(state, flight, part)
        counts = flight.arm.fit.estimate.counts.depths
        if flight.depth is not None:
            (counted,) = [level for level, count in enumerate(counts) if count != before[level]]
            assert counted == flight.depth

    policy._judge = judged  # type: ignore[method-assign]
    traffic.run(policy, 6000)
    assert len(unstopped) > 10
    for flight in unstopped:
        assert flight.depth is not None and flight.useful <= flight.depth <= len(flight.draft)
    assert any(flight.depth is not None and flight.depth < len(flight.draft) for flight in unstopped)


def test_guesses_are_worth_what_the_drafter_says_of_each():
    rates = Rates([[0.6]] * 4, [1.0] * 4)
    draft = Draft.chain([1, 2, 3], 0, confidence=[SURE, SURE, UNSURE])
    sure, unsure = MIDDLES[class_of(SURE)], MIDDLES[class_of(UNSURE)]
    assert rates.survivals(draft, 0) == pytest.approx([sure, sure**2, sure**2 * unsure])
    assert rates.survivals(Draft.chain([1, 2, 3], 0), 0) == pytest.approx([0.6, 0.36, 0.216])
    assert rates.survivals(draft, 5)[0] > sure > rates.survivals(draft, -5)[0]


def test_a_draft_is_worth_verifying_up_to_the_first_guess_that_is_not():
    estimate, benefit = pair(), Benefit(least=(0.2, 0.5, 0.9))
    arm = Arm(DraftPlan("head", Drafter(), 4, 4), Option(estimate), RequestFit(estimate))

    def levels(tokens: list[int], confidence: Sequence[float] = ()) -> int:
        draft = Draft.chain(tokens, 0, confidence=confidence)
        return arm.useful_levels(draft, estimate.rates.survivals(draft, 0), benefit)

    assert levels([1, 2], [SURE, SURE]) == 2
    assert levels([1, 2, 3], [SURE, 0.4, SURE]) == 1
    assert levels([1], [UNSURE]) == 0
    assert levels([1, 2, 3]) == 3  # it says nothing of single guesses


def test_rows_that_come_cheaper_by_the_dozen_are_priced_together():
    """A ninth row needs another tile, and those behind it come cheap: nobody would add it alone."""
    here = Pass.of(8, 8, [*[1.0] * 9, 3.0, 3.1, 3.2, 3.3, 9.0])
    prices = here.row_prices(5)
    assert prices == pytest.approx([0.575] * 4 + [5.7])
    assert prices == sorted(prices)
    straight = Pass.of(1, 1, [1.0 + rows for rows in range(9)])
    assert straight.row_prices(4) == pytest.approx([1.0] * 4)


@pytest.mark.parametrize(
    ("often", "seconds"), [(0.1, 8.97 - 7.2), (0.5, 8.97 - 7.2), (0.9, (9.78 - 7.2) / 2)]
)
def test_of_several_requests_second_guesses_are_priced_behind_all_first_ones(often: float, seconds: float):
    """Two of them that nearly always have a first guess fill a tile with it: a second one would begin another.

    The other rows of that are no cheaper for it if there is seldom a guess to fill them.
    """
    here = Pass.of(2, 2, [0.0, 5.27, 5.27, 6.48, 7.2, 8.97, 9.78, 11.1, 12.42])
    rates = Rates([[0.7], [0.6]], [0.9, often])
    (worth,) = best_plan(
        here,
        [Group(rates, 2, 2, is_stopping=True)],
        lambda drafter, levels, requests: 0.2 * levels * requests,
    )
    assert worth.least[1] / worth.least[0] == pytest.approx(seconds / ((7.2 - 5.27) / 2))


def test_a_guess_has_to_be_the_likelier_the_more_its_row_costs():
    worth = plan_of_stopping_head([1.0, 1.0, 1.0, 1.1, 1.2, 1.4], drafted=[1.0, 0.5, 0.0, 0.0])
    assert worth.depth == 3  # the stop decides: one level more than drafts had
    assert worth.least[0] == 0.0  # the second row is free
    assert list(worth.least) == sorted(worth.least)
    assert all(
        stop > least for stop, least in zip(worth.stop, worth.least, strict=True)
    )  # another level costs, too


def test_a_head_whose_drafts_were_never_short_has_its_depth_by_average_acceptance():
    """Its stop may end drafts earlier, but a first answer does not rely on it: four levels would cost too much."""
    assert plan_of_stopping_head([1.0, 1.0, 1.0, 1.4, 2.0, 3.0], drafted=[1.0] * 4).depth == 1


def plan_of_stopping_head(table: Sequence[float], drafted: Sequence[float]) -> Benefit:
    (worth,) = best_plan(
        Pass.of(1, 1, table),
        [Group(Rates([[0.8]] * 4, [1.0] * 4, drafted=drafted), 1, 4, is_stopping=True)],
        lambda drafter, levels, requests: 0.1 * levels,
    )
    return worth


def test_a_call_is_expected_to_be_as_deep_as_its_drafts_are():
    seldom_deep = Rates([[0.8]] * 4, [1.0] * 4, drafted=[1.0, 0.5, 0.0, 0.0])
    assert worked_levels([Group(seldom_deep, 1, 4, is_stopping=True)], 4) == pytest.approx(1.5)
    assert worked_levels([Group(seldom_deep, 2, 4, is_stopping=True)], 4) == pytest.approx(1.75)
    assert worked_levels([Group(seldom_deep, 1, 4)], 4) == 4  # what does not stop works for all levels
    assert worked_levels([Group(seldom_deep, 1, 4), Group(seldom_deep, 1, 0)], 4) == 4


def test_now_and_then_nothing_stops_a_draft():
    """Else nothing would ever be learned of what comes behind guesses that are unsure."""
    asked: list[Stop] = []

    head = replace(states_head(0.35e-3), knows=2.0, needs=NO_NEEDS, stops=True)
    traffic, policy = Traffic(TWO_CORES, [head], 1, cohorts=("chat",)), MeasuredPolicy()
    original = policy.plan

    def plan(entries, situation):
        plans = original(entries, situation)
        asked.extend(one.stop for one in plans if one is not None and one.max_nodes and one.stop is not None)
        return plans

    policy.plan = plan  # type: ignore[method-assign]
    traffic.run(policy, 2000)
    free = [stop for stop in asked if not stop.least]
    assert 0 < len(free) < len(asked) / 20
    assert all(len(stop.rates) == CLASSES for stop in asked)


def test_counts_of_classes_are_saved_and_fade():
    counts = DraftCounts()
    counts.count_request(4, 3, 2)
    counts.count_classes([5], 1)
    counts.count_end(2)
    again = DraftCounts.from_json(counts.as_json())
    assert again.as_json() == counts.as_json()
    counts.fade(0.5)
    assert counts.class_rate(5, 0.0, 1.0) == pytest.approx(1 / 3)  # half a node against one that was wrong
    broken = {**again.as_json(), "sure_accepted": [2.0] * CLASSES}
    with pytest.raises(ValueError, match="exceeds"):
        DraftCounts.from_json(broken)
    with pytest.raises(ValueError, match="must be a list of"):
        DraftCounts.from_json({**again.as_json(), "sure_accepted": [0.0], "sure_reached": [0.0]})


def test_other_limits_hold_as_soon_as_guesses_are_worth_something_else():
    estimate = pair()
    arm = Arm(DraftPlan("head", Drafter(), 4, 4), Option(estimate), RequestFit(estimate), is_stopping=True)
    for least in (0.5, 0.7):
        plan = arm.planned(2, Benefit(2, 1, 0.1, stop=(least, least)), True, 0)
        assert plan.stop is not None and plan.stop.least == (least, least)


@pytest.mark.parametrize("rule", list(Rule))
def test_only_where_texts_cannot_be_biased_does_a_head_stop_by_what_it_has_drawn(rule: Rule):
    traffic = Traffic(TWO_CORES, [replace(states_head(), knows=2.0, stops=True)], 1, ("chat",))
    traffic._fill()
    (request,) = traffic.running
    request.sampler.rule = rule
    record = MeasuredPolicy()._state(request)  # type: ignore[arg-type]
    assert [arm.is_stopping for arm in record.arms] == [rule is Rule.COUPLED]


def test_those_that_go_on_share_what_a_level_takes():
    here = Pass.of(4, 4, [1.0 + 0.01 * rows for rows in range(40)])

    def stops(going: float) -> float:
        rates = Rates([[0.8], [0.8]], [1.0, going], drafted=[1.0, going])
        (worth,) = best_plan(
            here, [Group(rates, 4, 2, is_stopping=True)], lambda drafter, levels, requests: 0.2 * levels
        )
        return worth.stop[0] - worth.least[1] / 0.8

    assert stops(0.25) > 3 * stops(1.0) > 0
