"""Settings of the cost estimates."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CostSettings:
    """How measurements change the cost estimates; weights are per pass, ratios relative to the expected time."""

    memory: float = 0.1  # weight of the newest pass in the pace: a busy core shows within ten passes
    shape_memory: float = 0.02  # weight of the newest pass in its size's own cost: averages noise out
    return_memory: float = 0.15  # the same for a size that returns after `recent` other passes
    recent: int = 8  # passes that re-estimate a returning size
    unseen: int = 64  # passes after which a size follows its measured neighbours
    forgotten: int = 1000  # passes after which a size no longer violates monotonicity
    settled: int = 50  # passes after which a size's own cost is known within `noise`
    noise: float = 1.03  # ratio of a shorter to a longer pass that is treated as noise
    profile_passes: int = 24  # pseudo-count of a measured profile: best of three runs, little noise
    pause: float = 1.25  # ratio of a slow pass: once is an interruption, twice in a row a change
    farthest: float = 4.0  # ratio at which one pass or call is clipped
    prior_rows: int = 4  # fixed cost of an unmeasured pass, in rows: typical for a small model on a CPU
    few_calls: int = (
        4  # calls of different depths that make a drafter's cost known; of one depth, twice as many
    )
    first_chunk: int = 64  # rows of the first prompt step, before its cost is known
    long_chunk: int = 256  # prompt rows from which on their rate no longer improves
    other_shape: float = (
        1.2  # ratio of two sizes' slow-downs above which two curves differ in shape, not by noise
    )


COSTS = CostSettings()
