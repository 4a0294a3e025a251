"""The simulator's closed forms against the code that really drafts remotely, both in virtual time."""

from dataclasses import replace

import pytest

from foreword.simulate.scenario import (
    AcceptanceCurve,
    FleetSize,
    LevelTimes,
    Network,
    PassTimes,
    Scenario,
    SimulatedCosts,
    Traffic,
)
from foreword.simulate.world import World
from helpers.virtual_cluster import Pacing, VirtualCluster

K = 5


def simulated(pacing: Pacing, batch: int, runs_ahead: bool) -> float:
    levels = LevelTimes(pacing.level, pacing.level_per_request)
    scenario = Scenario(
        FleetSize(targets=1, nodes=1, batch=batch),
        Network(pacing.round_trip, jitter=0.0, tail_chance=0.0),
        Traffic(prompt=0, answer=1e9),
        costs=SimulatedCosts(PassTimes.straight(pacing.plain_pass, pacing.per_row), levels, levels),
        kinds=(AcceptanceCurve.of_rate(pacing.alpha),),
        runs_ahead=runs_ahead,
        k=K,
        seconds=1200 * pacing.plain_pass,
    )
    return World(scenario).run().tokens_per_second


NEAR = Pacing(15e-3, 40e-6, 0.8e-3, 4e-6, 0.3e-3, 0.8)
FAR = replace(NEAR, round_trip=8e-3)
SLOW = Pacing(15e-3, 40e-6, 2.5e-3, 50e-6, 0.5e-3, 0.9)
WRONG = replace(NEAR, alpha=0.5)


@pytest.mark.parametrize(
    ("pacing", "batch", "runs_ahead"),
    [
        (NEAR, 1, False),
        (NEAR, 8, True),
        (FAR, 1, True),
        (FAR, 8, False),
        (SLOW, 1, False),
        (SLOW, 1, True),
        (SLOW, 8, True),
        (WRONG, 8, True),
    ],
)
def test_targets_with_a_node_are_as_fast_as_they_are_simulated(pacing: Pacing, batch: int, runs_ahead: bool):
    real = VirtualCluster(pacing, batch, K, runs_ahead).tokens_per_second(passes=400 if batch == 1 else 60)
    assert simulated(pacing, batch, runs_ahead) == pytest.approx(real, rel=0.1)
