"""What steps are booked as."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from foreword.control.reporting.figures import Usage, counts_of, run_percentile
from foreword.control.reporting.totals import SpeculationTotals
from foreword.speculation.draft import Draft
from foreword.speculation.report import RequestReport, StageSeconds, StepReport
from foreword.speculation.requests import DrafterView, Verdict


def part(draft: int, accepted: int, place: int = 0, called: str = "ngram") -> RequestReport:
    chain = Draft.chain(list(range(draft)), 10 + place)
    path = tuple(range(accepted))
    request: Any = SimpleNamespace(cohort="code", drafter_view=DrafterView(10))
    verdict = Verdict(tokens=(0,) * (accepted + 1), path=path, draft=chain)
    return RequestReport(
        request, verdict, run=1, context=9 + place, draws=True, called=called, draft_seconds=0.001
    )


def step(*parts: RequestReport) -> StepReport:
    return StepReport(parts, seconds=StageSeconds(0.001, 0.005, 0.001, 0.008))


def test_guesses_are_counted_by_their_place_in_the_answer():
    totals = SpeculationTotals(page_size=16)
    totals.observe(step(part(4, 2), part(3, 3, place=20), part(0, 0)), 0)
    pair = totals.pairs["ngram", "code"]
    assert (pair.asks, pair.draft_seconds) == (3, pytest.approx(0.003))
    assert [(band.first, band.reached, band.accepted) for band in pair.bands] == [(0, 3, 2), (16, 3, 3)]
    assert totals.tokens == 3 + 4 + 1


def test_pages_that_only_guesses_need_are_told():
    totals = SpeculationTotals(page_size=16)
    totals.observe(step(part(8, 0)), 0)  # 10 rows, then 18
    assert totals.provisional_pages == 1
    totals.observe(step(part(4, 0)), 0)
    assert (totals.provisional_pages, totals.provisional_peak) == (0, 1)


def test_preemptions_are_told_apart_by_whether_somebody_guessed():
    totals = SpeculationTotals(page_size=16)
    totals.observe(step(part(4, 0)), 2)
    totals.observe(step(part(0, 0, called="")), 3)
    assert totals.preemption_rates() == pytest.approx((1 / 0.008, 2 / 0.008))


def test_runs_follow_from_how_many_came_to_each_position():
    assert counts_of(10, [5, 2, 2]) == {0: 5, 1: 3, 3: 2}
    assert not counts_of(0, [])


def test_percentiles_of_runs():
    runs = Counter({0: 5, 1: 3, 4: 2})
    assert (run_percentile(runs, 0.5), run_percentile(runs, 0.9)) == (0, 4)
    assert run_percentile(Counter(), 0.5) == 0


def test_costs_are_of_busy_time_or_of_all_of_it():
    usage = Usage(
        wall_seconds=100, draft_seconds=10, target_seconds=50, tokens=1000, draft_price=1, target_price=3
    )
    assert usage.cost_per_million() == pytest.approx(1e6 * (50 * 3 + 10) / 3600 / 1000)
    assert usage.cost_per_million(reserved=True) == pytest.approx(1e6 * (100 * 3 + 100) / 3600 / 1000)
    assert (usage.draft_utilisation, usage.target_utilisation, usage.device_seconds) == (0.1, 0.5, 60)
    assert Usage(tokens=5).cost_per_million() is None
