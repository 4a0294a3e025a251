"""What the autoscaler did in a run, or why it did nothing."""

import math

from foreword.simulate.outcome import Outcome
from foreword.simulate.scenario import Autoscale, Scenario
from foreword.simulate.world import LOOK_SECONDS


def scaling_told(scenario: Scenario, outcome: Outcome) -> str:
    """One line."""
    rule, over_time = scenario.autoscale, outcome.nodes_over_time
    assert rule is not None
    have, wanted = over_time[0], outcome.nodes_wanted
    if min(over_time) != max(over_time):
        return f"--autoscale: nodes at first {have}, at most {max(over_time)}, at the end {over_time[-1]}"
    if wanted is None or wanted == have:
        return (
            f"--autoscale changed nothing: by the ratio formula {have} is the number of nodes for this load"
        )
    return f"--autoscale changed nothing: nodes wanted {wanted}, there {have}, but {_too_short(rule, wanted > have)}"


def _too_short(rule: Autoscale, is_more: bool) -> str:
    after = rule.up_after if is_more else rule.down_after
    what = f"one is added after {after:g} s of too few and drafts {rule.boot:g} s later (--boot-s)"
    if not is_more:
        what = f"one is given back after {after:g} s of too many"
    # The first tenth of the time is warm-up, and the load is looked at every second.
    seconds = math.ceil((after + is_more * rule.boot + 3 * LOOK_SECONDS) / 0.9)
    return f"{what}: simulate --seconds {seconds} or more"
