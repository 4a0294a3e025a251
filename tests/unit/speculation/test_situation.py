"""What a policy may look at."""

import random
from functools import cache

import pytest

from foreword.engine.requests.request import Request
from foreword.speculation.acceptance_stats import AcceptanceStats, DraftOutcome
from foreword.speculation.draft import Draft
from foreword.speculation.measured.calls import CallCost
from foreword.speculation.measured.costs import StepCosts
from foreword.speculation.measured.curve import CostCurve
from foreword.speculation.measured.settings import COSTS
from foreword.speculation.measured.situation import MAX_COHORTS, OTHER, Situation
from foreword.speculation.proposing import fair_shares
from foreword.speculation.report import DrafterCall, RequestReport, StageSeconds, StepReport
from foreword.speculation.requests import Verdict
from helpers.requests import lone_request


def test_acceptance_is_counted_by_position():
    stats = AcceptanceStats()
    stats.observe(DraftOutcome(True, nodes=5, depth=5, accepted=2))
    stats.observe(DraftOutcome(True, nodes=7, depth=3, accepted=3))  # a tree of three levels
    stats.observe(DraftOutcome(True, nodes=0, depth=0, accepted=0))  # it had nothing to say
    stats.observe(DraftOutcome(False, nodes=0, depth=0, accepted=0))  # nobody was asked
    assert (stats.draft_requests, stats.drafts, stats.drafted, stats.accepted) == (3, 2, 12, 5)
    assert stats.coverage == pytest.approx(2 / 3)
    assert stats.drafted_per_position == [2, 2, 2, 1, 1]
    assert stats.accepted_per_position == [2, 2, 1, 0, 0]
    assert stats.rejected_per_position == [0, 0, 1, 0, 0]


def test_guesses_beyond_an_answers_end_are_neither_right_nor_wrong():
    end = 7
    draft = Draft((1, end, 3, 9, 4), (-1, 0, 1, 0, 2), 1)  # 1, then the end or 9; 3 and 4 follow the end
    ended = Verdict((0, 1), (1, end), draft=draft)
    assert ended.judged.tokens == (1, end, 9)
    corrected = Verdict((0,), (1, 5), draft=draft)
    assert corrected.judged == draft
    broken = Verdict((), (), error="no numbers", draft=draft)
    assert len(broken.judged) == 0
    situation, request = Situation(), lone_request([1])
    situation.count(StepReport([RequestReport(request, ended, run=1, called="ngram")]))
    stats = request.acceptance
    assert (stats.drafts, stats.drafted, stats.accepted, stats.unjudged) == (1, 3, 2, 2)
    assert (stats.drafted_per_position, stats.accepted_per_position) == ([1, 1], [1, 1])
    assert sum(stats.rejected_per_position) == 0
    (cohort,) = situation.cohorts.values()
    assert cohort == stats


def test_the_cost_of_a_step_is_what_was_measured_between_and_beyond():
    curve = CostCurve()
    assert curve.seconds(4) is None
    curve.observe(1, 5.0)
    assert curve.seconds(1) == 5.0
    assert curve.seconds(6) == pytest.approx(10.0)  # twice the rows plus the prior's four
    curve.observe(8, 12.0)
    assert curve.seconds(8) == 12.0
    assert curve.seconds(4) == pytest.approx(5 + 7 * 3 / 7)
    assert curve.seconds(20) == pytest.approx(24.0)
    assert curve.points() == [(1.0, 5.0), (8.0, 12.0)]


def test_new_measurements_move_an_old_cost_slowly():
    curve = CostCurve()
    for _ in range(30):
        curve.observe(2, 1.0)
    curve.observe(2, 2.0)
    assert curve.seconds(2) == pytest.approx(1.0)  # one may be a pause
    curve.observe(2, 2.0)
    assert 1.0 < curve.seconds(2) < 1.15  # type: ignore[operator]
    for _ in range(100):
        curve.observe(2, 2.0)
    assert curve.seconds(2) == pytest.approx(2.0, rel=1e-2)


def test_what_slows_one_size_of_step_slows_those_that_were_not_seen_since():
    curve = CostCurve()
    for _ in range(50):
        for rows in (1, 4):
            curve.observe(rows, 1.0 + rows)
    for _ in range(100):
        curve.observe(1, 4.0)  # another process takes a core
    assert curve.seconds(1) == pytest.approx(4.0, rel=0.02)
    assert 8.0 < curve.seconds(4) < 10.5  # type: ignore[operator]


def test_what_plain_steps_cost_is_not_taken_from_longer_ones():
    """A profile says nothing of what judging takes; plain windows, few as they are, tell what a plain step costs."""
    curve = CostCurve()
    curve.begin_with([(1, 6.0), (3, 7.0)])
    for _ in range(6):
        for _ in range(300):
            curve.observe(3, 8.8)
        for _ in range(8):
            curve.observe(1, 6.6)
    for _ in range(300):
        curve.observe(3, 8.8)
    assert curve.seconds(1) == pytest.approx(6.6, rel=0.02)
    assert curve.seconds(3) == pytest.approx(8.8, rel=0.01)


def test_one_pause_is_no_change():
    curve = CostCurve()
    for _ in range(50):
        curve.observe(1, 1.0)
    curve.observe(1, 1000.0)
    assert curve.seconds(1) < 1.3  # type: ignore[operator]


def test_a_profile_is_believed_until_steps_tell_better():
    curve = CostCurve()
    curve.begin_with([(1, 1.0), (8, 2.0)])
    assert curve.table(8) == pytest.approx([0.8, 1, 8 / 7, 9 / 7, 10 / 7, 11 / 7, 12 / 7, 13 / 7, 2])
    for _ in range(200):
        curve.observe(1, 1.0)
        curve.observe(8, 4.0)
    assert curve.seconds(8) == pytest.approx(4.0, rel=0.05)
    assert curve.seconds(1) == pytest.approx(1.0, rel=0.15)


def test_a_longer_pass_is_never_expected_to_be_faster():
    curve = CostCurve()
    for rows, seconds in ((1, 1.0), (2, 0.9), (4, 1.1)):
        curve.observe(rows, seconds)
    table = curve.table(6)
    assert table is not None
    assert table == sorted(table)
    assert curve.seconds(2) == pytest.approx(0.9)


def test_levels_are_blamed_where_levels_and_asks_have_changed_together():
    """For many requests a drafter would else look far dearer than it is, and never be asked for them again."""
    cost = CallCost()
    for levels, asks in ((8, 32), (4, 32), (2, 24)):
        cost.observe(levels, 2.6e-3 * levels, asks)
    assert cost.seconds(1, 32) == pytest.approx(2.6e-3, rel=0.25)
    assert cost.seconds(1, 1) == pytest.approx(2.6e-3, rel=0.25)


@pytest.mark.parametrize("often", [1, 200])
def test_a_size_that_was_only_measured_at_the_start_makes_no_larger_one_slower(often: int):
    """Nor one that was seen long ago."""
    curve = CostCurve()
    curve.begin_with([(1, 1.0), (2, 1.1), (4, 1.5)])
    for _ in range(often):
        curve.observe(1, 1.0)
    for _ in range(1000):
        curve.observe(2, 0.8)
        curve.observe(4, 1.5)
    table = curve.table(6)
    assert table is not None
    assert table == sorted(table)
    assert table[2] == pytest.approx(0.8, rel=0.06)


@pytest.mark.parametrize(("per_level", "per_row"), [(0.0, 0.1), (2.0, 0.0), (1.0, 0.3)])
def test_a_level_costs_more_the_more_requests_are_in_it(per_level: float, per_row: float):
    cost = CallCost()
    for levels, asks in [(1, 1), (1, 1), (4, 2), (2, 8), (5, 3), (3, 1), (2, 5)]:
        cost.observe(levels, 0.5 + (per_level + per_row * asks) * levels, asks)
    for levels, asks in ((1, 1), (4, 8), (1, 8)):
        found = cost.seconds(levels, asks)
        assert found == pytest.approx(0.5 + (per_level + per_row * asks) * levels, rel=0.1)


@pytest.mark.parametrize("slower", [10.0, 0.1])
def test_what_makes_calls_far_slower_or_faster_makes_every_level_so(slower: float):
    """Though only one depth is asked for since: what a level costs would else look as before, and deeper ones cheap."""
    cost = CallCost()
    for number in range(60):
        cost.observe(1 + number % 4, 1.0 + number % 4)
    for _ in range(60):
        cost.observe(2, slower * 2.0)
    assert cost.seconds(2) == pytest.approx(2.0 * slower, rel=0.2)
    one_more = (cost.seconds(6) - cost.seconds(2)) / 4
    assert 0.4 * slower < one_more < 2.5 * slower


def test_a_lookup_costs_something_for_every_request():
    cost = CallCost()
    for asks in (1, 1, 2, 8, 5, 3):
        cost.observe(8, 0.05 + 0.02 * asks, asks)
    assert cost.seconds(8, 32) == pytest.approx(0.69, rel=0.05)


HEAD_MS = {
    (1, 1): 1.56,
    (3, 1): 2.92,
    (1, 2): 1.73,
    (3, 2): 3.67,
    (1, 4): 2.53,
    (3, 4): 5.55,
    (1, 8): 4.23,
    (3, 8): 9.91,
}
"""By levels and asks: the default model's head on one core."""


def test_what_a_head_costs_for_many_is_known_nearly_from_what_it_costs_for_one():
    """Half of what a level costs is believed to grow with the requests: it would else look all but free for many."""
    cost = CallCost()
    for number in range(13):
        levels = (1, 3)[number % 2]
        cost.observe(levels, HEAD_MS[levels, 1], 1)
    for (levels, asks), taken in HEAD_MS.items():
        assert cost.seconds(levels, asks) == pytest.approx(taken, rel=0.25)


def test_one_slow_step_of_a_new_size_is_not_believed_of_it_nor_of_larger_ones():
    curve = CostCurve()
    curve.begin_with([(rows, 6.0 + 0.01 * rows) for rows in (1, 8, 16, 32, 64)])
    for _ in range(100):
        curve.observe(24, 6.24)
    curve.observe(48, 9.0)
    table = curve.table(64)
    assert table is not None
    assert table[48] < 6.6
    assert table[64] < 6.7


def test_slopes_are_remembered_when_asks_no_longer_change():
    cost = CallCost()
    for asks in (1, 1, 2, 8, 5, 3):
        cost.observe(4, 0.1 * asks, asks)
    for _ in range(3000):
        cost.observe(4, 1.0, 10)
    assert cost.seconds(4, 20) == pytest.approx(2.0, rel=0.05)


def test_the_price_of_a_level_is_remembered_when_only_the_asks_change():
    cost, rng = CallCost(), random.Random(1)
    for levels in (1, 4, 2, 1, 3, 1):
        cost.observe(levels, 2.0 * levels, 32)
    for _ in range(3000):
        cost.observe(1, 2.0 + rng.gauss(0, 0.05), rng.choice((30, 31, 32)))
    assert cost.seconds(8, 32) == pytest.approx(16.0, rel=0.1)


@pytest.mark.parametrize(("fixed", "per_level"), [(0.2, 0.0), (0.0, 3.0), (0.5, 1.0)])
def test_a_drafters_call_costs_something_fixed_and_something_a_level(fixed: float, per_level: float):
    cost = CallCost()
    cost.observe(5, 1000.0)  # the first call warms up and says nothing
    assert cost.seconds(5) == 0.0
    for levels in (1, 3, 5, 2, 4):
        cost.observe(levels, fixed + per_level * levels)
    for levels in (1, 8, 16):
        assert cost.seconds(levels) == pytest.approx(fixed + per_level * levels, rel=0.15)


def test_a_call_whose_depth_never_changed_is_taken_to_cost_by_its_levels():
    """Shallow drafts then look cheap until they are measured, and deep ones are not taken to be free."""
    cost = CallCost()
    for _ in range(3):
        cost.observe(4, 0.3)
    assert cost.seconds(4) == pytest.approx(0.3, rel=0.05)
    assert cost.seconds(1) < 0.15
    assert cost.seconds(9) > 0.6


def test_catching_up_is_not_what_a_level_costs():
    """A head that is tried every forty tokens, and between that twice in a row."""
    cost, rng = CallCost(), random.Random(2)
    for number in range(300):
        levels, behind = rng.choice((1, 2, 4)), 0 if number % 5 == 0 else rng.randint(30, 60)
        cost.observe(levels, (0.6 + 0.6 * levels + 0.05 * behind) * rng.uniform(0.95, 1.05), lag=behind)
    for levels in (1, 4):
        assert cost.seconds(levels) == pytest.approx(0.6 + 0.6 * levels, rel=0.15)
    assert cost.lag_seconds == pytest.approx(0.05, rel=0.2)


def test_a_drafter_that_has_become_fast_again_is_believed_though_it_is_always_behind():
    cost = CallCost()
    for _ in range(50):
        cost.observe(4, 30.0)
    for _ in range(60):
        cost.observe(4, 3.0 + 0.05 * 40, lag=40)
    assert cost.seconds(4) < 6


def test_fewer_requests_and_other_depths_do_not_make_a_lookup_look_dear():
    """No part of the cost is negative: where one would be, the others are fitted without it."""
    cost = CallCost()
    for levels, requests in [(4, 32), *[(4, 21)] * 6, (1, 13), (2, 13), *[(5, 13)] * 2, *[(5, 5)] * 9]:
        cost.observe(levels, 0.15 + 0.05 * requests, requests)
    assert cost.seconds(5, 5) == pytest.approx(0.4, rel=0.1)
    assert cost.seconds(8, 32) < 2.5


def test_one_pause_of_a_drafter_is_no_change():
    cost = CallCost()
    for _ in range(30):
        cost.observe(4, 1.0)
    cost.observe(4, 1000.0)
    assert cost.seconds(4) < 1.4


def test_a_longer_context_begins_with_what_rows_add_at_shorter_ones():
    """At a long context only plain steps were seen: that a row would cost a fifth of a step is no measurement."""
    costs = StepCosts()
    costs.begin_with(0, [(1, 6.0), (2, 6.4), (3, 6.9), (4, 8.0)])
    for _ in range(3):
        costs.observe(report(1, context=2000, seconds=StageSeconds(total=9.0)))
    table = costs.step_table(4, context=2000)
    assert table is not None
    assert table[1:] == pytest.approx([9.0, 9.6, 10.35, 12.0])
    assert costs.step_seconds(1) == pytest.approx(6.0)


def test_pauses_do_not_make_row_counts_dear_that_are_seldom_seen():
    """Each pause is believed of all sizes for a while; it must be taken back from all of them, too."""
    costs = StepCosts()
    costs.begin_with(0, [(8, 14.0), (12, 20.0), (20, 33.0)])
    for step in range(3000):
        rows = 20 if step % 60 > 50 else 8
        seconds = {8: 14.0, 20: 33.0}[rows] * (3.0 if step % 23 == 0 else 1.0)
        costs.observe(report(*[1] * rows, seconds=StageSeconds(total=seconds)))
    table = costs.step_table(20)
    assert table is not None
    assert table[12] / table[8] == pytest.approx(20 / 14, rel=0.03)
    assert table[20] / table[8] == pytest.approx(33 / 14, rel=0.03)


@pytest.mark.parametrize("between", [1, 2, 5])
def test_pauses_with_usual_steps_between_them_are_none_in_a_row(between: int):
    curve = CostCurve()
    for step in range(400):
        curve.observe(1, 0.040 if step > 200 and step % (between + 1) == 0 else 0.010)
    assert curve.seconds(1) == pytest.approx(0.010, rel=0.01)


@pytest.mark.parametrize("seldom", [10, 40])
def test_a_row_count_that_is_seldom_seen_and_slow_each_time_is_no_pause(seldom: int):
    costs = StepCosts()
    costs.begin_with(0, [(8, 14.0), (20, 20.0)])
    for step in range(2000):
        rows = 8 if step % seldom else 20
        costs.observe(report(*[1] * rows, seconds=StageSeconds(total={8: 14.0, 20: 33.0}[rows])))
    assert costs.step_seconds(20) == pytest.approx(33.0, rel=0.05)


def test_rows_that_fit_are_those_of_the_contexts_that_were_seen_last():
    costs = StepCosts()
    costs.begin_with(0, [(1, 5.0), (5, 10.0), (16, 21.0)])
    for _ in range(50):
        costs.observe(report(*[1] * 5, context=800, seconds=StageSeconds(total=20.0)))
    assert costs.rows_within(21.0, 100, with_prompts=False) < 7


def test_a_context_that_was_never_seen_is_believed_to_cost_what_the_next_shorter_one_does():
    costs = StepCosts()
    costs.begin_with(0, [(1, 1.0)])
    costs.begin_with(512, [(1, 3.0)])
    assert costs.step_seconds(1, context=1500) == pytest.approx(3.0)
    assert costs.step_seconds(1, context=300) == pytest.approx(1.0)


def test_a_machine_that_has_become_slow_is_believed_at_once():
    costs = StepCosts()
    for _ in range(100):
        costs.observe(report(1, seconds=StageSeconds(total=10.0)))
    for _ in range(20):
        costs.observe(report(1, seconds=StageSeconds(total=30.0)))
    assert costs.step_seconds(1) > 24


def test_what_a_row_takes_behind_a_long_text_is_not_compared_with_several_behind_a_short_one():
    """Long texts guess, then a short one decodes plainly: that one row has become faster says nothing of three."""
    costs = StepCosts()
    costs.begin_with(0, [(1, 6.0), (3, 7.0)])
    for _ in range(200):
        costs.observe(report(1, context=800, seconds=StageSeconds(total=9.0)))
        costs.observe(report(1, 1, 1, context=800, seconds=StageSeconds(total=12.0)))
    for _ in range(100):
        costs.observe(report(1, context=60, seconds=StageSeconds(total=6.0)))
    table = costs.step_table(4, context=60)
    assert table is not None
    assert table[3] < 7.5


def report(*runs: int, context: int = 0, seconds: StageSeconds, **others) -> StepReport:
    parts = [RequestReport(request(n), Verdict(), run=run, context=context) for n, run in enumerate(runs)]
    return StepReport(parts, seconds=seconds, **others)


@cache
def request(number: int) -> Request:
    """The same for every report: making one takes longer than learning from it."""
    return lone_request([1])


def test_a_step_costs_its_whole_time_but_for_drafting():
    costs = StepCosts()
    costs.observe(report(1, 1, seconds=StageSeconds(draft=3.0, verify=0.1, accept=0.5, total=10.0)))
    assert costs.step_seconds(2) == pytest.approx(7.0)


def test_prompt_chunks_and_long_contexts_do_not_blur_the_cost_of_decoding():
    costs = StepCosts()
    costs.observe(report(30, 1, seconds=StageSeconds(total=50.0)))
    costs.observe(report(1, seconds=StageSeconds(total=1.0)))
    costs.observe(report(1, context=20_000, seconds=StageSeconds(total=4.0)))
    assert costs.step_seconds(1) == pytest.approx(1.0)
    assert costs.step_seconds(1, context=20_000) == pytest.approx(4.0)
    assert costs.step_seconds(1, context=5_000) == pytest.approx(1.0)  # nothing is known: the shorter one's


def test_a_step_that_was_tried_again_teaches_nothing():
    costs = StepCosts()
    costs.observe(report(1, seconds=StageSeconds(total=9.0), passes=2))
    assert costs.step_seconds(1) is None


def test_drafting_is_kept_by_method():
    costs = StepCosts()
    calls = [DrafterCall("ngram", requests=2, guesses=8, levels=4, empty=1, seconds=0.4)]
    for _ in range(2):
        costs.observe(report(1, seconds=StageSeconds(draft=0.4, total=1.0), calls=calls))
    assert costs.draft_seconds("ngram", 4, 2) == pytest.approx(0.4, rel=0.02)
    assert costs.draft_seconds("suffix", 4) == 0.0


@pytest.mark.parametrize("seconds", [0.01, 0.1, 1.0])
def test_as_many_prompt_rows_as_fit_into_a_time(seconds: float):
    costs = StepCosts()
    assert costs.prompt_rows_within(seconds) == 64  # cautious before anything is known
    for rows in (64, 128, 512):
        costs.observe(report(rows, seconds=StageSeconds(total=0.004 * rows)))
    assert costs.prompt_rows_within(seconds) == max(1, int(seconds / 0.004))


def test_a_slow_first_pass_does_not_keep_chunks_small():
    """Steps take 1 ms and 0.4 ms a row; the first one, which warms up, took five seconds."""
    costs, rows = StepCosts(), 64
    costs.observe(report(64, seconds=StageSeconds(total=5.0)))
    for _ in range(30):
        rows = max(costs.prompt_rows_within(0.1), 16)
        costs.observe(report(rows, seconds=StageSeconds(total=0.001 + 0.0004 * rows)))
    assert 200 < rows < 250


def test_users_cannot_name_any_number_of_cohorts():
    situation = Situation()
    for number in range(3 * MAX_COHORTS):
        part = RequestReport(lone_request([1]), Verdict(), called=f"method-{number}")
        situation.count(StepReport([part]))
    assert len(situation.cohorts) == MAX_COHORTS + 1
    assert situation.cohorts[OTHER].draft_requests == 2 * MAX_COHORTS


@pytest.mark.parametrize(
    ("wanted", "total", "shares"),
    [
        ([5, 5, 5], 15, [5, 5, 5]),
        ([5, 5, 5], 9, [3, 3, 3]),
        ([1, 10, 10], 9, [1, 4, 4]),
        ([0, 8], 3, [0, 3]),
        ([4, 4], -2, [0, 0]),
        ([], 3, []),
    ],
)
def test_scarce_rows_are_shared_evenly(wanted: list[int], total: int, shares: list[int]):
    assert fair_shares(wanted, total) == shares


def test_observing_a_step_is_part_of_a_call_and_makes_no_pass_slower():
    """Steps with drafts and plain ones beside them are then compared on equal terms."""
    costs = StepCosts()
    for number in range(60):
        is_plain = number % 4 == 3
        calls = [DrafterCall("head", 1, 2, 2, 0, 1.0, is_observing=True)]
        calls.append(DrafterCall("ngram", 1, 2, 2, 0, 0.1))
        spent = StageSeconds(total=12.0, observe=2.0) if is_plain else StageSeconds(1.1, 10, 2, 13.1, 2.0)
        costs.observe(report(1, seconds=spent, calls=[] if is_plain else calls))
    assert costs.step_seconds(1) == pytest.approx(10.0)
    assert costs.draft_seconds("head", 2) == pytest.approx(3.0)
    assert costs.draft_seconds("ngram", 2) == pytest.approx(0.1)
    # A prompt is observed beside a call: that is no cost of the call, and part of the step's time.
    for _ in range(20):
        costs.observe(report(1, 50, seconds=StageSeconds(1.0, 90, 10, 101.0, 10.0), calls=calls[:1]))
    assert costs.draft_seconds("head", 2) == pytest.approx(3.0, rel=0.01)
    assert costs.prompt_rows_within(100.0) == 51


def test_observing_a_cold_step_is_no_cost_of_a_call():
    costs = StepCosts()
    calls = [DrafterCall("head", 1, 2, 2, 0, 1.0, is_observing=True)]
    for number in range(40):
        spent = StageSeconds(1.0, 10, 2, 13.0, observe=2.0 if number < 20 else 6.0)
        costs.observe(report(1, seconds=spent, calls=calls, is_cold=number >= 20))
    assert costs.draft_seconds("head", 2) == pytest.approx(3.0)


def decoding(costs: StepCosts, count: int, pace: float, *, asks: bool) -> None:
    """Steps on a machine that is so many times as slow as at first."""
    for number in range(count):
        calls = [DrafterCall("head", 1, 2, 1 + number % 3, 0, pace * 1e-3)] if asks else []
        total = pace * (10e-3 + (1e-3 if asks else 0.0))
        part = RequestReport(lone_request([1]), Verdict(), run=1)
        draft = pace * 1e-3 if asks else 0.0
        costs.observe(StepReport([part], calls, StageSeconds(draft=draft, total=total)))


def test_a_machine_that_has_become_faster_makes_drafters_faster_that_nobody_asks():
    """Else a drafter that was last asked in a slow minute would look too dear to be asked ever again."""
    costs = Situation().costs
    decoding(costs, 60, 1.0, asks=True)
    usual = costs.draft_seconds("head", 2)
    decoding(costs, 60, 3.0, asks=True)
    assert costs.draft_seconds("head", 2) == pytest.approx(3 * usual, rel=0.15)
    decoding(costs, 60, 1.0, asks=False)
    assert costs.draft_seconds("head", 2) == pytest.approx(usual, rel=0.2)
    decoding(costs, 60, 1.0, asks=True)
    assert costs.draft_seconds("head", 2) == pytest.approx(usual, rel=0.1)


def test_saved_calls_follow_the_pace_of_the_process_that_restores_them():
    busy, costs = Situation().costs, Situation().costs
    decoding(busy, 60, 3.0, asks=True)
    costs.restore(busy.as_json())
    decoding(costs, 3, 1.0, asks=False)
    usual = busy.draft_seconds("head", 2) / 3
    assert costs.draft_seconds("head", 2) == pytest.approx(usual, rel=0.05)
    again = Situation().costs
    again.restore(costs.as_json())
    assert again.draft_seconds("head", 2) == pytest.approx(usual, rel=0.05), (
        "saved as they are believed to be"
    )


@pytest.mark.parametrize(("pace", "believed"), [(50.0, COSTS.farthest), (1 / 50, 1 / COSTS.farthest)])
def test_nobody_is_taken_to_have_become_far_slower_or_faster_unasked(pace: float, believed: float):
    costs = Situation().costs
    decoding(costs, 60, 1.0, asks=True)
    usual = costs.draft_seconds("head", 2)
    decoding(costs, 200, pace, asks=False)
    assert costs.draft_seconds("head", 2) == pytest.approx(believed * usual)


@pytest.mark.parametrize(("fixed", "per_token"), [(20e-3, 0.0), (2e-3, 0.1e-3)])
def test_the_cost_of_one_that_is_always_behind_is_told_apart_from_catching_up(fixed: float, per_token: float):
    """A drafter that is only probed now and then never has a call without; a dear one must not look free."""
    cost, rng = CallCost(), random.Random(0)
    cost.observe(1, 1.0)  # the first says nothing
    for _ in range(20):
        behind = rng.randint(20, 400)
        cost.observe(1, fixed + per_token * behind, lag=behind)
    assert cost.seconds(1) == pytest.approx(fixed, rel=0.1)
    assert cost.lag_seconds == pytest.approx(per_token, rel=0.1, abs=1e-6)


def test_one_that_is_always_as_far_behind_is_taken_to_cost_what_it_takes():
    cost = CallCost()
    cost.observe(1, 1.0)
    for _ in range(10):
        cost.observe(1, 20e-3, lag=100)
    assert cost.seconds(1) == pytest.approx(20e-3, rel=0.1)


def test_calls_that_are_nearly_up_to_date_say_little_of_what_catching_up_takes():
    """A lookup that is tried for new texts and then every few tokens, and is faster than when it was measured."""
    cost = CallCost()
    for number in range(12):
        cost.observe(1 + number % 4, 0.6)
    for _ in range(20):
        for behind in (720, *[4] * 12):
            cost.observe(4, 0.2 + 0.005 * behind, lag=behind)
    assert cost.lag_seconds == pytest.approx(0.005, rel=0.15)
    assert cost.seconds(4) == pytest.approx(0.2, rel=0.2)


def test_where_one_row_takes_longer_than_two_two_are_not_taken_to_take_as_long():
    """One may be computed in another way: what is expected of two without guesses would make guesses look cheap."""
    curve = CostCurve()
    curve.begin_with([(1, 11.0), (2, 10.0), (4, 15.0)])
    for _ in range(100):
        curve.observe(1, 11.0)
    for _ in range(100):
        curve.observe(2, 10.0)
        curve.observe(4, 15.0)
    table = curve.table(4)
    assert table is not None
    assert table[2] == pytest.approx(10.0, rel=0.01)
    assert table[1] > table[2]
