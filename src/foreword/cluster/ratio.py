"""How many draft nodes some targets need: the formula that the autoscaler and the simulator share."""

import math
from collections.abc import Callable
from dataclasses import dataclass

UTILISATION = 0.7
"""Part of a step that a node may draft in: what is left takes up bursts and late messages."""

LevelSeconds = Callable[[int], float]
"""Seconds of one level for so many requests at once; more requests never take less."""


@dataclass(frozen=True)
class DraftWork:
    """What drafting for one request means, in every step of its target."""

    levels: float  # that are wanted
    step_seconds: float  # of the target: its pass, and what it waits
    ahead: float = 1.0  # levels drafted for every level wanted: 1, or 2.0 to 2.4 where nodes run ahead
    utilisation: float = UTILISATION


def gained_tokens(acceptance: float, levels: int) -> float:
    """Tokens that guesses add to a pass, each right with this chance if those before it are."""
    return sum(acceptance**level for level in range(1, levels + 1))


def requests_per_node(work: DraftWork, level_seconds: LevelSeconds, capacity: int) -> int:
    """The most requests m for which ahead · levels · level_seconds(m) fits into a node's part of a step.

    `capacity` is what the node's memory holds. 0: not even one fits, so that no number of nodes keeps up; fewer levels
    or a faster drafter may.
    """

    def fits(requests: int) -> bool:
        drafting = work.ahead * work.levels * level_seconds(requests)
        return drafting <= work.utilisation * work.step_seconds

    fitting, too_many = 0, capacity + 1
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if fits(middle):
            fitting = middle
        else:
            too_many = middle
    return fitting


def wanted_draft_nodes(requests: int, work: DraftWork, level_seconds: LevelSeconds, capacity: int) -> int:
    """Nodes that draft for so many requests of all targets in time; 0 where none could (`requests_per_node`).

    For targets of batch B that is B / m of a node each. The reserve is in `DraftWork.utilisation`, once.
    """
    per_node = requests_per_node(work, level_seconds, capacity)
    return math.ceil(requests / per_node) if per_node else 0
