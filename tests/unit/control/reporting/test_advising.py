"""Every failure mode is named by its figures, and only then."""

from dataclasses import replace
from typing import Any

import pytest

from foreword.control.reporting.advising import advise, without_advice
from foreword.control.reporting.figures import Bounds, ControlReport, DecisionReport, PairReport, Usage
from foreword.control.reporting.reading import as_json, from_json

PAYING = PairReport(
    "head",
    "code/greedy",
    in_use=True,
    predicted=Bounds(1.2, 1.3, 1.4),
    measured=Bounds(1.15, 1.2, 1.25),
    depth=4,
    kept=3,
    acceptance_by_level=(0.8, 0.7, 0.6),
    coverage=0.95,
    asks=1000,
    draft_ms=0.5,
    is_model=True,
)
LOSING = replace(PAYING, in_use=False, predicted=Bounds(0.8, 0.9, 1.0), measured=None)
CALM = ControlReport(pairs=(PAYING,), batch=1, step_ms=8.0, row_ms=0.2, host_share=0.05, kv_pages=100)


def modes(report: ControlReport) -> list[str]:
    return [one.mode for one in advise(report)]


def with_pair(**changes: Any) -> ControlReport:
    return replace(CALM, pairs=(replace(LOSING, **changes),))


def test_where_guessing_pays_nothing_is_said():
    assert modes(CALM) == []


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (ControlReport(), "too little is measured yet: the busiest drafter has 0 draft requests"),
        (with_pair(asks=49), "too little is measured yet: the busiest drafter has 49 draft requests"),
        (CALM, "no change is needed"),
        (with_pair(draft_ms=0.5), "plain decoding is as fast as head for code/greedy and is used there"),
    ],
)
def test_without_advice_there_is_one_reason(report: ControlReport, words: str):
    assert advise(report) == []
    assert without_advice(report).startswith(words)


@pytest.mark.parametrize(
    ("report", "mode"),
    [
        (with_pair(acceptance_by_level=(0.1,), coverage=0.6, kept=1, draft_ms=0.1), "low yield"),
        (with_pair(draft_ms=40.0), "drafter too slow"),
        (
            replace(with_pair(draft_ms=0.01), batch=32, row_ms=0.3),
            "no idle arithmetic at this batch",
        ),
        (with_pair(coverage=0.05, draft_ms=0.01), "few drafts"),
        (with_pair(network_ms=0.4, draft_ms=0.5), "network slower than drafting"),
        (with_pair(acceptance_by_level=(0.25,), kept=1, draft_ms=0.1), "wrong pairing"),
        (with_pair(state="held", reason="gain: 0.9"), "held"),
        (replace(CALM, preemptions_guessing=1.0, preemptions_plain=0.5), "KV pressure"),
        (replace(CALM, host_share=0.2), "host overhead"),
        (replace(CALM, enabled=False), "switched off"),
    ],
)
def test_each_mode_is_named_with_figures_and_a_remedy(report: ControlReport, mode: str):
    found = advise(report)
    assert mode in [one.mode for one in found]
    told = next(one for one in found if one.mode == mode)
    assert told.change
    assert "nothing" not in told.change
    assert "temperature" not in told.change  # never offered: it would change texts
    if mode not in ("switched off", "held"):
        assert any(sign.isdigit() for sign in told.what)


@pytest.mark.parametrize(
    ("report", "mode"),
    [
        (with_pair(acceptance_by_level=(0.1,), coverage=0.6, kept=1, asks=10), "low yield"),  # too few to say
        (with_pair(draft_ms=0.5), "drafter too slow"),
        (with_pair(coverage=0.2), "few drafts"),
        (with_pair(network_ms=0.1), "network slower than drafting"),
        (with_pair(acceptance_by_level=(0.25,), is_model=False), "wrong pairing"),
        (replace(CALM, preemptions_guessing=0.005), "KV pressure"),
        (replace(CALM, preemptions_guessing=1.0, preemptions_plain=0.9), "KV pressure"),
    ],
)
def test_no_mode_is_named_without_its_figures(report: ControlReport, mode: str):
    assert mode not in modes(report)


def test_a_report_that_is_told_later_says_so():
    pair = replace(PAYING, since_seconds=5.0, decisions=(DecisionReport(2.0, "on", "gains"),))
    told = replace(CALM, pairs=(pair, PAYING), usage=Usage(wall_seconds=10.0, target_seconds=5.0)).aged(10.0)
    assert told.usage.target_utilisation == 0.25
    assert (told.pairs[0].since_seconds, told.pairs[0].decisions[0].ago_seconds) == (15.0, 12.0)
    assert told.pairs[1].since_seconds is None


def test_a_report_is_read_back_as_it_was():
    assert from_json(as_json(CALM)) == CALM
    assert from_json({**as_json(CALM), "from_the_future": 1}) == CALM
