"""Cases that can be worked out by hand: the simulator has to agree with the formulas that the other commands use."""

from dataclasses import replace

import pytest

from foreword.bench.link import LinkReport, PassCost
from foreword.bench.theory import FLAT, DraftingCost, RelativeStepCurve, predict
from foreword.simulate.scenario import (
    AcceptanceCurve,
    FleetSize,
    LevelTimes,
    Network,
    PassTimes,
    Scenario,
    SimulatedCosts,
    Traffic,
    WaitRule,
)
from foreword.simulate.scenario import DraftPlacement as Who
from foreword.simulate.world import SimulationResult, World

PASS, LEVEL = 10e-3, 0.5e-3
AT_ONCE = Network(0.0, 0.0, 0.0, 0.0)
ALONE = Scenario(
    FleetSize(targets=1, nodes=1, batch=32),
    AT_ONCE,
    Traffic(prompt=0, answer=1e9),
    costs=SimulatedCosts(PassTimes(((1, PASS),)), LevelTimes(LEVEL), LevelTimes(LEVEL)),
    drafting=Who.LOCAL,
    waiting=WaitRule.ALL,
    runs_ahead=False,
    seconds=8.0,
)
"""One target, passes and levels that take as long for 32 requests as for one, no chance but that of acceptance."""


def run(scenario: Scenario) -> SimulationResult:
    return World(scenario).run()


def speedup(scenario: Scenario) -> float:
    plain = run(replace(scenario, drafting=Who.PLAIN, seconds=2.0))
    return run(scenario).tokens_per_second / plain.tokens_per_second


@pytest.mark.parametrize(("alpha", "k"), [(0.0, 3), (0.5, 2), (0.8, 5), (0.95, 8), (1.0, 4)])
def test_a_target_alone_does_what_theory_says(alpha: float, k: int):
    (expected,) = predict(alpha, DraftingCost(LEVEL / PASS), [k], FLAT)
    found = run(replace(ALONE, kinds=(AcceptanceCurve.of_rate(alpha),), k=k))
    assert found.tokens_per_pass == pytest.approx(expected.tokens_per_pass, rel=0.02)
    plain = run(replace(ALONE, drafting=Who.PLAIN, seconds=2.0))
    assert plain.tokens_per_second == pytest.approx(32 / PASS, rel=0.01)
    assert found.tokens_per_second / plain.tokens_per_second == pytest.approx(expected.speedup, rel=0.02)


def test_passes_get_longer_with_their_rows_as_they_were_measured():
    curve = RelativeStepCurve(((1, 1.0), (4, 1.2), (8, 2.0)))
    (expected,) = predict(0.8, DraftingCost(LEVEL / PASS), [5], curve)
    points = tuple((32 * rows, PASS * ratio) for rows, ratio in curve.points)
    curved = replace(ALONE, costs=replace(ALONE.costs, passes=PassTimes(points)))
    assert speedup(curved) == pytest.approx(expected.speedup, rel=0.02)


@pytest.mark.parametrize(("seconds", "passes"), [(0.5, 1), (1.0, 3), (20.0, 60), (0.2, 0)])
def test_only_passes_that_end_in_the_simulated_time_count(seconds: float, passes: int):
    """A pass takes a third of a second; the warm-up has none but in the longest run, where it has six."""
    slow = replace(ALONE.costs, passes=PassTimes(((1, 0.33),)))
    found = run(replace(ALONE, costs=slow, drafting=Who.PLAIN, seconds=seconds))
    warm_up = 6 if seconds == 20.0 else 0
    assert found.tokens == 32 * (passes - warm_up)


def test_a_pass_has_a_row_for_each_request_also_for_new_ones_that_have_no_draft_yet():
    """A row takes a second: two requests, of which the older one has a draft of three tokens."""
    costs = SimulatedCosts(PassTimes.straight(1.0, 1.0), LevelTimes(0.0), LevelTimes(0.0))
    traffic = Traffic((1.0,), prompt=0, answer=1e9)
    (target,) = World(replace(ALONE, costs=costs, traffic=traffic, k=3)).targets
    target.queue.append(0.0)
    assert target.step(0.0) == 1.0
    target.queue.append(1.0)
    assert target.step(1.0) == 1.0 + 2 + 3


def test_a_node_without_distance_is_a_drafter_here():
    here = replace(ALONE, fleet=FleetSize(targets=2, nodes=1, batch=4))
    shared = replace(here, fleet=replace(here.fleet, nodes=2))
    there = replace(shared, drafting=Who.REMOTE)
    one, other = run(here), run(there)
    assert other.tokens == pytest.approx(one.tokens, rel=2e-3)  # a pass may end on either side of the limit
    assert other.tokens_per_pass == pytest.approx(one.tokens_per_pass, rel=2e-3)
    assert other.waiting_share == pytest.approx(one.waiting_share, rel=2e-3)


@pytest.mark.parametrize("levels", [1, 3, 5])
def test_the_break_even_distance_is_that_of_bench_link(levels: int):
    cost = PassCost(1, 1, 0.0, 0.0, levels, None, LEVEL * 1e3)
    found = LinkReport("", 0.0, 0.0, (cost,)).break_even_ms(0.8, levels, PASS * 1e3)
    assert found is not None
    farthest = found / 1e3

    def at(distance: float) -> float:
        network = replace(AT_ONCE, round_trip=distance)
        return speedup(replace(ALONE, drafting=Who.REMOTE, network=network, k=levels))

    assert at(farthest) == pytest.approx(1.0, rel=0.02)
    assert at(0.8 * farthest) > 1 > at(1.2 * farthest)


def test_who_waits_only_while_it_is_worth_it_is_never_far_below_plain_decoding():
    """A node beyond the break-even distance: those who wait for it lose, those who weigh it do not."""
    far = replace(ALONE, drafting=Who.REMOTE, network=replace(AT_ONCE, round_trip=0.1))
    assert speedup(far) < 0.5
    assert speedup(replace(far, waiting=WaitRule.NONE)) >= 0.999
    assert speedup(replace(far, waiting=WaitRule.WORTH)) >= 0.95


def test_running_ahead_hides_drafting_where_guesses_are_right():
    """All guesses right, a pass as long as twenty levels: with the first ones there is always all that is wanted."""
    sure = replace(ALONE, drafting=Who.REMOTE, kinds=(AcceptanceCurve.of_rate(1.0),), runs_ahead=True)
    found = run(sure)
    assert found.tokens_per_pass == pytest.approx(6, rel=0.01)
    assert found.tokens_per_second == pytest.approx(6 * 32 / PASS, rel=0.02)
