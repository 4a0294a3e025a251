"""Whether a step may be launched before the last one has told its tokens."""

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.rules.rule import Rule
from foreword.control.fixed import FixedPolicy
from foreword.engine.scheduling.asynchronous import PLANNED_EVERY, PLANNED_SELDOM, LookaheadGate
from foreword.speculation.measured.situation import Situation
from foreword.speculation.probe import FaultLog
from foreword.speculation.requests import DraftPlan
from helpers.requests import lone_request

PARAMS = SamplingParams(temperature=0, max_tokens=50)


class Wants(FixedPolicy):
    """A policy that would fill so many rows with guesses."""

    def __init__(self, rows: int = 0) -> None:
        super().__init__()
        self.rows = rows
        self.asked: list[int] = []

    def rows_wanted(self, entries, situation, beside=0) -> int:
        self.asked.append(len(entries))
        if self.rows < 0:
            raise RuntimeError("a policy that fails")
        return self.rows


def requests(count: int, under_way: int, guesses: bool = True):
    made = [lone_request([1, 2], PARAMS, 20) for _ in range(count)]
    for place, request in enumerate(made):
        request.kv.passes = 1 if place < under_way else 0
        request.speculation = DraftPlan("some", object(), 4, 4) if guesses else None  # type: ignore[arg-type]
    return made


def test_a_step_follows_where_nobody_is_to_guess():
    policy = Wants()
    lookout = LookaheadGate(policy, FaultLog())
    assert not lookout.may_follow(requests(2, under_way=0), Situation())  # there is nothing to follow
    assert lookout.may_follow(requests(2, under_way=2), Situation())
    assert policy.asked == [2]
    policy.rows = 1
    assert not lookout.may_follow(requests(2, under_way=2), Situation())


def test_requests_without_a_drafter_are_followed_without_asking():
    policy = Wants(rows=5)
    assert LookaheadGate(policy, FaultLog()).may_follow(requests(2, 2, guesses=False), Situation())
    assert policy.asked == []


def test_where_guessing_is_switched_off_nobody_is_asked():
    policy = Wants(rows=5)
    assert LookaheadGate(policy, FaultLog()).may_follow(requests(2, 2), Situation(speculating=False))
    assert policy.asked == []


def test_one_who_may_guess_and_is_not_under_way_is_waited_for():
    assert not LookaheadGate(Wants(), FaultLog()).may_follow(requests(2, under_way=1), Situation())


def test_now_and_then_the_policy_plans_a_whole_step():
    """What it is asked between steps is how many rows it wants, from books that only whole steps fill."""
    lookout, running = LookaheadGate(Wants(), FaultLog()), requests(1, 1)
    followed = [lookout.may_follow(running, Situation()) for _ in range(PLANNED_EVERY + 1)]
    assert followed == [True] * PLANNED_EVERY + [False]
    lookout.may_follow(
        requests(1, under_way=0), Situation()
    )  # the step that it planned begins the count anew
    assert lookout.may_follow(running, Situation())


def steps_until_planned(lookout: LookaheadGate) -> int:
    """Passes that follow each other before the policy plans one, which is then under way."""
    running, steps = requests(1, 1), 0
    while lookout.may_follow(running, Situation()):
        steps += 1
    assert not lookout.may_follow(requests(1, under_way=0), Situation())
    return steps


def test_where_the_policy_goes_on_not_to_guess_it_plans_more_seldom():
    policy = Wants()
    lookout = LookaheadGate(policy, FaultLog())
    assert [steps_until_planned(lookout) for _ in range(4)] == [64, 128, 256, 256]
    policy.rows = 1
    assert steps_until_planned(lookout) == 0
    policy.rows = 0
    assert steps_until_planned(lookout) == PLANNED_EVERY < PLANNED_SELDOM == 256


def test_when_half_of_the_requests_are_gone_the_policy_plans():
    """Where fewer rows are computed guesses pay that did not."""
    lookout = LookaheadGate(Wants(), FaultLog())
    assert not lookout.may_follow(requests(8, under_way=0), Situation())
    assert lookout.may_follow(requests(5, under_way=5), Situation())
    assert not lookout.may_follow(requests(4, under_way=4), Situation())
    assert not lookout.may_follow(requests(4, under_way=0), Situation())
    assert lookout.may_follow(requests(4, under_way=4), Situation())


def test_steps_that_are_planned_for_others_reasons_do_not_make_it_patient():
    lookout = LookaheadGate(Wants(), FaultLog())
    for _ in range(5):
        assert lookout.may_follow(requests(1, 1), Situation())
        assert not lookout.may_follow(requests(2, under_way=1), Situation())
        assert not lookout.may_follow(requests(1, under_way=0), Situation())
    assert steps_until_planned(lookout) == PLANNED_EVERY


@pytest.mark.parametrize("guesses", [False, True])
def test_steps_that_nobody_could_guess_in_do_not_make_it_patient(guesses: bool):
    lookout = LookaheadGate(Wants(), FaultLog())
    for _ in range(3):
        for _ in range(300):
            lookout.may_follow(requests(1, 1, guesses), Situation(speculating=not guesses))
        lookout.may_follow(requests(1, under_way=0), Situation())
    assert steps_until_planned(lookout) == PLANNED_EVERY


def test_a_policy_that_fails_costs_the_step_ahead_alone():
    faults = FaultLog()
    assert not LookaheadGate(Wants(rows=-1), faults).may_follow(requests(1, 1), Situation())
    assert faults.counts == {"rows wanted": 1}


@pytest.mark.parametrize(
    ("params", "rule", "expected"),
    [
        (SamplingParams(max_tokens=9), Rule.COUPLED, True),
        (SamplingParams(max_tokens=9), Rule.TOKEN, False),
        (SamplingParams(max_tokens=9, presence_penalty=0.5), Rule.COUPLED, False),
        (SamplingParams(max_tokens=9, bad_words=["x"]), Rule.COUPLED, False),
        (SamplingParams(max_tokens=2), Rule.COUPLED, True),
        (SamplingParams(max_tokens=1), Rule.COUPLED, False),  # the token under way is its last
    ],
)
def test_who_can_be_followed(params: SamplingParams, rule: Rule, expected: bool):
    request = lone_request([1, 2], params, 20, rule=rule, bad_words=((3, 4),) if params.bad_words else ())
    request.kv.certain_rows = 2  # a pass under way draws its next token
    assert request.can_pipeline is expected


def test_a_request_with_a_form_waits_for_its_token():
    request = lone_request([1, 2], PARAMS, 20)
    request.kv.certain_rows = 2
    assert request.can_pipeline
    request.sampler.grammar = object()  # type: ignore[assignment]
    assert not request.can_pipeline


def test_a_prompt_that_is_not_through_can_be_followed_whatever_it_asks_for():
    request = lone_request([1, 2, 3], SamplingParams(max_tokens=1, presence_penalty=0.5), 20)
    request.kv.certain_rows = 2
    assert request.can_pipeline
