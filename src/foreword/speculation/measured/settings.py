"""Settings of the cost estimates."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CostSettings:
    """Settings of the cost estimates' response to measurements."""

    memory: float = 0.1  # weight of the newest pass or call in the pace: a busy core shows within ten passes
    shape_memory: float = 0.02  # weight of the newest pass in its size's own cost: averages noise out
    # the same for the first 8 passes of a size that was absent from the previous 8
    return_memory: float = 0.15
    profile_passes: int = 24  # pseudo-count of a measured profile: best of three runs, little noise
    settled: int = 50  # passes after which a size's own cost is known within 3%
    pause: float = 1.25  # ratio to the expected time: once is an interruption, twice in a row a change
    farthest: float = 4.0  # ratio to the expected time at which one pass or call is clipped
    prior_rows: int = 4  # fixed cost of an unmeasured pass, in rows: typical for a small model on a CPU
    # calls of different depths needed to estimate the cost per level; twice as many of one depth
    few_calls: int = 4


COSTS = CostSettings()
