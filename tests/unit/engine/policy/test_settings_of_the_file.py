"""The file's margins and shares are those that the controller decides by."""

import copy
from pathlib import Path

from helpers.rollout_world import PASS, POLICY, ROW, Guesser, RolloutWorld


def test_a_margin_that_nobody_reaches_keeps_everybody_plain(tmp_path: Path):
    for margin, is_used in ((100.0, False), (1.02, True)):
        policy = copy.deepcopy(POLICY)
        policy["defaults"] = {"margin_on": margin}
        policy["cohorts"][0]["drafters"] = ["fresh"]
        del policy["rollout"], policy["state_file"]
        world = RolloutWorld(tmp_path, Guesser, policy)
        for _ in range(4):
            world.answer()
        assert any(control.is_on for control in world.measured.options.values()) is is_used


def test_guesses_make_no_step_longer_than_a_latency_class_allows(tmp_path: Path):
    deepest = []
    for milliseconds in (1e3 * (PASS + 3.5 * ROW), 1000.0):
        policy = copy.deepcopy(POLICY)
        policy["cohorts"][0]["drafters"] = ["fresh"]
        policy["latency"] = {"quick": {"match": {"metadata.task": "code"}, "tpot_ms": milliseconds}}
        del policy["rollout"], policy["state_file"]
        world = RolloutWorld(tmp_path, Guesser, policy)
        for _ in range(6):
            world.answer()
        report = world.core.stats().control
        assert report is not None
        deepest.append(len(report.pairs[0].depths) - 1)
    assert deepest[0] <= 3 < deepest[1]
