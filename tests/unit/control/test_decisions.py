"""Single decisions of the measured policy, by hand."""

from collections.abc import Sequence

import pytest

from foreword.control.acceptance import Estimates
from foreword.control.options import Moment, Option
from foreword.control.rates import Rates
from foreword.control.settings import ControlSettings
from foreword.control.trim import Offer, choose
from foreword.control.value import Benefit, Group, Pass, best_plan
from foreword.speculation.draft import Draft

FLAT = [1.0 + 0.001 * rows for rows in range(40)]
"""Seconds by rows where rows are all but free."""


def certain(rate: float, levels: int = 8, coverage: float = 1.0) -> Rates:
    return Rates([[rate]] * levels, [coverage] * levels)


def test_a_guess_counts_as_often_as_all_before_it_are_right():
    rates = certain(0.5)
    assert rates.survival(0)[:3] == pytest.approx([0.5, 0.25, 0.125])
    chain = Draft.chain([1] * 8, 10)
    dear = [1.0 + 0.2 * rows for rows in range(40)]
    (kept,) = choose([Offer(1, chain, rates.survivals(chain, 0))], Pass.of(1, 1, dear), 0.0)
    assert len(kept) == 2  # a third brings an eighth of a token and takes a seventh of the time


def test_drafting_is_part_of_the_price():
    here, group = Pass.of(1, 1, FLAT), Group(certain(0.8), 1, 4)
    (free,) = best_plan(here, [group], lambda drafter, levels, requests: 0.0)
    (cheap,) = best_plan(here, [group], lambda drafter, levels, requests: 0.5 * levels)
    (dear,) = best_plan(here, [group], lambda drafter, levels, requests: 3.0 * levels)
    assert free.gain > cheap.gain > 0 > dear.gain
    assert cheap.depth < free.depth == 4


def test_an_empty_answer_is_no_rejected_guess():
    pair = Estimates().of("ngram", "", "greedy")
    for number in range(200):
        if number % 2:
            pair.requested(4, 0)
        else:
            pair.requested(4, 1)
            pair.counts.count_level(0, 1, 0)
            pair.finished(1, pair.rates.expected[0])
    pair.refresh(0.0)
    assert pair.rates.accepted[0][0] > 0.9
    assert pair.rates.coverage[0] == pytest.approx(0.5, abs=0.05)


def test_a_drafter_that_seldom_answers_is_worth_less():
    here = Pass.of(1, 1, FLAT)
    often, seldom = (
        best_plan(
            here, [Group(certain(0.8, coverage=coverage), 1, 4)], lambda drafter, levels, requests: 0.1
        )[0]
        for coverage in (0.9, 0.1)
    )
    assert often.gain > 5 * seldom.gain


@pytest.mark.parametrize(
    ("asks", "promises", "states"),
    [
        (0, (0.01, 0.02, 0.01, -0.01), (False, True, True, False)),
        (30, (0.02, 0.015, 0.03, 0.03, 0.045), (True, False, False, False, True)),
        (3000, (0.02, 0.01, -0.01, 0.025, 0.03), (True, True, False, True, True)),
    ],
)
def test_what_was_tried_has_to_promise_more_the_less_is_known_of_it(
    asks: int, promises: Sequence[float], states: Sequence[bool]
):
    """Costs and acceptance are known within a few per cent: where nothing is gained half of the looks promise some."""
    control = Option(Estimates().of("head", "", "chat"), is_cost_known=True)
    control.estimate.counts.requested[1] = float(asks)
    settings, found = ControlSettings(dwell_steps=0), []
    for step, promise in enumerate(promises):
        control.decide(Benefit(1, 1, promise), promise, settings, Moment(step, 0.0, 0))
        found.append(control.is_on)
    assert found == list(states)
