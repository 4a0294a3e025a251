"""In which order steps are planned, launched, committed, learned from and booked."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.control.fixed import FixedPolicy
from foreword.engine.step_pipeline import StepPipeline
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftRequest, DraftTask
from foreword.speculation.measured.situation import Situation
from foreword.speculation.report import StepReport
from foreword.speculation.requests import DraftPlan, PassEntry
from helpers.checked_target import CheckedTarget
from helpers.engines import ask, core_on
from helpers.saboteur import Saboteur


class Written:
    """A core that writes down what is asked of it."""

    def __init__(self, steps_ahead: int, follows: bool) -> None:
        self.steps_ahead = steps_ahead
        self.follows = follows  # whether a step can be launched while another is under way
        self.done: list[str] = []
        self.under_way = self.launched = 0

    def end_late(self) -> list[str]:
        return []

    def launch(self) -> int | None:
        if (self.under_way and not self.follows) or self.launched == 4:
            return None
        self.launched += 1
        self.under_way += 1
        self.done.append(f"launch {self.launched}")
        return self.launched

    def commit(self, step: int) -> int:
        self.under_way -= 1
        self.done.append(f"commit {step}")
        return step

    def settle(self, step: int) -> list[str]:
        self.done.append(f"settle {step}")
        return [f"tokens of {step}"]


@pytest.mark.parametrize(
    ("steps_ahead", "follows", "order"),
    [
        (1, False, "l1 c1 s1 l2 c2 s2 l3 c3 s3 l4 c4 s4"),  # on a CPU a launch is the pass itself
        (
            2,
            False,
            "l1 c1 l2 s1 c2 l3 s2 c3 l4 s3 c4 s4",
        ),  # with guesses: the device has work during the books
        (2, True, "l1 l2 c1 l3 s1 c2 l4 s2 c3 s3 c4 s4"),
    ],
)
def test_a_device_has_its_next_step_before_the_books_of_the_last_are_done(
    steps_ahead: int, follows: bool, order: str
):
    core = Written(steps_ahead, follows)
    pipeline = StepPipeline(cast(Any, core))
    told = [pipeline.advance() for _ in range(4)]
    assert told == [[f"tokens of {step}"] for step in (1, 2, 3, 4)]
    assert [f"{what[0]}{what[-1]}" for what in core.done] == order.split()
    assert not pipeline.is_busy


class Guesser(Drafter):
    def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
        return [Draft.chain([1, 2][: one.max_nodes], len(one.request.tokens)) for one in asks]

    def forget(self, request: DraftRequest) -> None:
        """Nothing is kept."""


class WrittenPolicy(FixedPolicy):
    """Writes down when it plans and when it learns."""

    def __init__(self) -> None:
        super().__init__(Guesser(), 2)
        self.done: list[str] = []

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> list[DraftPlan | None]:
        self.done.append("plan")
        return list(super().plan(entries, situation))

    def learn(self, report: StepReport) -> None:
        self.done.append("learn")


def test_a_policy_learns_from_a_step_before_it_plans_the_next():
    """It compares what came with what it had asked for, which the next plan puts something else in the place of."""
    policy = WrittenPolicy()
    core = core_on(CheckedTarget(Saboteur(random.Random(0), 0.0)), policy=policy, steps_ahead=2)
    request = ask(core, [1, 2, 3], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    pipeline = StepPipeline(core)
    while core.has_requests or pipeline.is_busy:
        pipeline.advance()
    assert request.finish_reason == "length"
    assert policy.done.count("plan") == policy.done.count("learn") > 3
    assert ("plan", "plan") not in list(pairwise(policy.done))
