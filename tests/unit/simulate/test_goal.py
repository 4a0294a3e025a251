"""The smallest fleet that reaches a goal, on small worlds."""

from dataclasses import replace
from pathlib import Path

import pytest

from foreword.cli.cluster.simulate import GoalOptions
from foreword.cli.cluster.simulated import answer_lines
from foreword.errors import RequestError
from foreword.simulate.scenario import DraftPlacement, Failure, FailureKind, FleetSize, Scenario, Traffic
from foreword.simulate.sweep import Goal, Vary, _least, find_fleets
from foreword.simulate.world import World

SMALL = Scenario(FleetSize(targets=2, nodes=1, batch=2), traffic=Traffic(prompt=0, answer=16), seconds=1.0)


def found(scenario: Scenario, goal: Goal, vary: Vary = Vary.TARGETS, most: int = 16):
    return find_fleets(scenario, goal, vary, most, lambda *_: None)


def rate_of(targets: int, drafting: DraftPlacement, nodes: int) -> float:
    fleet = replace(SMALL.fleet, targets=targets, nodes=nodes)
    return World(replace(SMALL, fleet=fleet, drafting=drafting)).run().tokens_per_second


@pytest.mark.parametrize("start", [1, 2, 5, 16])
def test_the_search_finds_the_least_count(start: int):
    for answer in range(1, 18):
        tried: list[int] = []

        def reaches(count: int, answer: int = answer, tried: list[int] = tried) -> bool:
            tried.append(count)
            return count >= answer

        assert _least(reaches, start, 16, lambda: False) == (answer if answer <= 16 else None)
        assert len(tried) == len(set(tried)) <= 8
        assert all(1 <= count <= 16 for count in tried)


def test_each_way_of_drafting_has_its_smallest_fleet():
    wanted = 5 * rate_of(1, DraftPlacement.PLAIN, 0)
    trials, answers = found(SMALL, Goal(tokens_per_second=wanted))
    assert [one.who for one in answers] == ["plain", "local", "remote"]
    for one in answers:
        fleet = one.fleet
        assert fleet is not None
        assert fleet in trials
        who, nodes = DraftPlacement(one.who), -(-fleet.targets // 2)
        assert fleet.nodes == (nodes if who is DraftPlacement.REMOTE else 0)
        assert rate_of(fleet.targets, who, nodes) == fleet.tokens_per_second >= wanted
        assert rate_of(fleet.targets - 1, who, -(-(fleet.targets - 1) // 2)) < wanted
        assert fleet.cost_per_hour == 10 * fleet.targets + fleet.nodes
    assert answers[1].fleet.targets < answers[0].fleet.targets  # type: ignore[union-attr]
    assert found(SMALL, Goal(tokens_per_second=wanted)) == (trials, answers), "the same seed, the same answer"


def test_arrivals_that_one_target_cannot_serve():
    busy = replace(
        SMALL,
        fleet=FleetSize(targets=1, nodes=0, batch=32),
        traffic=Traffic((200.0,), prompt=0, answer=32),
        seconds=2.0,
    )
    trials, answers = found(busy, Goal(tokens_per_second=5500, token_ms_p95=100))
    assert [one.who for one in answers] == ["plain", "local"], "without nodes no way has any"
    assert answers[1].fleet is not None
    assert answers[1].fleet.targets == 2
    assert trials[-2].missed == [f"{trials[-2].tokens_per_second:.0f} tokens/s"]


def test_a_latency_that_full_batches_never_have_is_given_up_at_once():
    trials, answers = found(SMALL, Goal(token_ms_p95=1.0))
    assert len(trials) == len(answers) == 3
    assert all("full batches on any number of targets" in answer.why_not for answer in answers)
    assert answer_lines(answers)[0].startswith("plain: not reached: p95 ")


def test_a_throughput_beyond_the_bound_is_not_reached():
    trials, answers = found(SMALL, Goal(tokens_per_second=1e9), most=4)
    assert [trial.targets for trial in trials] == [2, 4] * 3
    assert all(answer.why_not.endswith("with 4 targets; --goal-most allows no more") for answer in answers)


def test_draft_nodes_for_given_targets():
    slow = replace(SMALL, fleet=FleetSize(targets=2, nodes=2, batch=2))
    trials, (answer,) = found(slow, Goal(tokens_per_second=1.0), Vary.NODES)
    assert (answer.who, answer.fleet.targets, answer.fleet.nodes) == ("remote", 2, 1)  # type: ignore[union-attr]
    assert [trial.nodes for trial in trials] == [2, 1]
    assert answer_lines([answer]) == ["remote: 2 targets and 1 draft node, 21 an hour"]


def test_the_cheapest_is_named():
    _, answers = found(SMALL, Goal(tokens_per_second=1.0))
    lines = answer_lines(answers)
    assert lines[0] == "plain: 1 target, 10 an hour, the cheapest"
    assert lines[2] == "remote: 1 target and 1 draft node, 11 an hour"


def test_as_many_nodes_as_fail_are_there():
    failing = replace(
        SMALL,
        fleet=FleetSize(targets=4, nodes=2, batch=2),
        failures=(Failure(FailureKind.KILL, 2, 0.1, 0.1),),
    )
    _, answers = found(failing, Goal(tokens_per_second=1.0))
    assert answers[2].fleet.nodes == 2  # type: ignore[union-attr]


def test_more_than_arrives_cannot_be_wanted():
    with pytest.raises(RequestError, match="--rate brings 160 a second"):
        found(replace(SMALL, traffic=Traffic((10.0,), answer=16)), Goal(tokens_per_second=161))


@pytest.mark.parametrize(
    ("goals", "page", "autoscale", "message"),
    [
        (GoalOptions(goal_most=3), None, False, "--goal-most needs a goal"),
        (GoalOptions(goal_vary="nodes"), None, False, "--goal-vary needs a goal"),
        (GoalOptions(1.0, goal_vary="all"), None, False, "--goal-vary must be targets or nodes"),
        (GoalOptions(1.0), Path("page.html"), False, "--page shows one fleet"),
        (GoalOptions(1.0), None, True, "--autoscale changes"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    goals: GoalOptions, page: Path | None, autoscale: bool, message: str
):
    with pytest.raises(RequestError, match=message):
        goals.check(page, autoscale)
