"""A pretend target whose passes take a scripted time."""

import random

from foreword.backends.batch import ForwardBatch, ForwardOutput
from helpers.checked_target import CheckedTarget
from helpers.clocks import ScriptedClock
from helpers.saboteur import Saboteur


class TimedTarget(CheckedTarget):
    """A pass takes 1 ms and 0.1 ms for every row, by its own clock."""

    def __init__(self) -> None:
        super().__init__(Saboteur(random.Random(0), 0.0))
        self.clock = ScriptedClock()

    def forward(self, batch: ForwardBatch, store: object = None) -> ForwardOutput:
        self.clock.pass_by(1e-3 + 1e-4 * len(batch.token_ids))
        return super().forward(batch, store)
