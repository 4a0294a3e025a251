"""Settings of the cost estimates: each with its unit and its reason."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CostSettings:
    """How costs follow what is measured."""

    memory: float = 0.1  # weight of the newest pass or call in the pace: a busy core is noticed within ten
    shape_memory: float = 0.02  # the same in what its size costs beside others: noise averages out
    return_memory: float = 0.15  # the same for the first 8 passes of a size that was not seen in the 8 before
    profile_passes: int = 24  # passes that a measured profile counts as: the best of three has little noise
    settled: int = 50  # passes after which a size's own cost is known within noise (3%)
    pause: float = 1.25  # times the expected time: once is an interruption, twice in a row a change
    farthest: float = 4.0  # times the expected time that one pass or call counts as at most
    prior_rows: int = 4  # rows that an unknown pass costs beside its own: a small model on a CPU
    few_calls: int = 4  # calls of different depths that tell what a level costs, or twice as many of one


COSTS = CostSettings()
