"""The file's margins and shares are those that the controller decides by."""

import copy
from pathlib import Path

from helpers.rollout_world import POLICY, Guesser, RolloutWorld


def test_a_margin_that_nobody_reaches_keeps_everybody_plain(tmp_path: Path):
    for margin, is_used in ((100.0, False), (1.02, True)):
        policy = copy.deepcopy(POLICY)
        policy["defaults"] = {"margin_on": margin}
        policy["cohorts"][0]["drafters"] = ["fresh"]
        del policy["rollout"], policy["state_file"]
        world = RolloutWorld(tmp_path, Guesser, policy)
        for _ in range(4):
            world.answer()
        assert any(control.is_on for control in world.measured.controls.values()) is is_used
