"""The load generator's formulas, on times made up for it."""

from dataclasses import asdict, astuple

import numpy as np
import pytest

from foreword.bench.serve import report as formulas
from foreword.bench.serve.generator import ContentChunk, Ending, RequestOutcome
from foreword.bench.serve.report import GoodputLimits, parse_limits
from foreword.errors import RequestError


def answer(times: list[float], tokens: list[int | None], usage: int | None, last: float) -> RequestOutcome:
    chunks = [ContentChunk(time, count) for time, count in zip(times, tokens, strict=True)]
    ending = Ending.COMPLETED
    return RequestOutcome(
        due=10.0, sent=10.25, ending=ending, chunks=chunks, last_event_time=last, usage_tokens=usage
    )


def test_latencies_count_from_when_the_request_was_due():
    outcome = answer([11.0, 11.5, 13.0], [None] * 3, usage=9, last=15.0)
    assert formulas.time_to_first_token(outcome) == 1.0  # not 0.75: sending late is no excuse
    assert formulas.end_to_end(outcome) == 5.0
    assert formulas.time_per_output_token(outcome) == (5.0 - 1.0) / (9 - 1)
    assert formulas.gaps(outcome) == [0.5, 1.5]
    assert formulas.gaps_per_token(outcome) is None


def test_a_chunk_of_several_tokens_is_one_gap_and_several_gaps_per_token():
    outcome = answer([11.0, 12.0, 16.0], [1, 2, 4], usage=7, last=16.0)
    assert formulas.gaps(outcome) == [1.0, 4.0]
    assert formulas.gaps_per_token(outcome) == [0.5, 0.5, 1.0, 1.0, 1.0, 1.0]


def test_the_tokens_of_the_first_chunk_took_no_time():
    assert formulas.time_per_output_token(answer([11.0, 16.0], [4, 5], usage=9, last=16.0)) == 5.0 / 5
    assert formulas.time_per_output_token(answer([11.0, 16.0], [4, 5], usage=None, last=16.0)) == 5.0 / 5
    assert formulas.time_per_output_token(answer([11.0], [4], usage=4, last=11.0)) is None


def test_text_without_a_token_of_its_own_leaves_its_gap_to_the_next():
    outcome = answer([11.0, 12.0, 15.0], [1, 0, 2], usage=3, last=15.0)
    assert formulas.gaps_per_token(outcome) == [2.0, 2.0]


def test_tokens_come_from_usage_then_from_the_chunks_counts_then_from_their_number():
    assert formulas.output_tokens(answer([11.0, 12.0], [2, 3], usage=6, last=12.0)) == 6
    assert formulas.output_tokens(answer([11.0, 12.0], [2, 3], usage=None, last=12.0)) == 5
    assert formulas.output_tokens(answer([11.0, 12.0], [2, None], usage=None, last=12.0)) == 2
    assert formulas.output_tokens(answer([], [], usage=None, last=12.0)) == 0


def test_what_an_answer_does_not_have_is_none_and_not_zero():
    empty = answer([], [], usage=1, last=12.0)
    assert formulas.time_to_first_token(empty) is None
    assert formulas.time_per_output_token(empty) is None
    assert formulas.end_to_end(empty) == 2.0
    assert formulas.time_per_output_token(answer([11.0], [None], usage=1, last=11.0)) is None
    assert formulas.end_to_end(RequestOutcome(due=1.0)) is None


def test_percentiles_are_interpolated_linearly():
    values = formulas.spread([0.004, 0.001, 0.003, 0.002])
    assert astuple(values) == pytest.approx((4, 2.5, 2.5, 3.7, 3.85, 3.97, 4.0))
    sample = np.random.default_rng(3).exponential(size=101)
    exact = [1e3 * sorted(sample)[place] for place in (50, 90, 95, 99)]  # 101 values: each falls on one
    assert astuple(formulas.spread(list(sample)))[2:6] == pytest.approx(exact)


def test_no_values_are_no_numbers():
    nothing = asdict(formulas.spread([]))
    assert nothing.pop("n") == 0
    assert set(nothing) == {"mean_ms", "p50_ms", "p90_ms", "p95_ms", "p99_ms", "max_ms"}
    assert set(nothing.values()) == {None}


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        (GoodputLimits(ttft=1000), True),
        (GoodputLimits(ttft=999), False),
        (GoodputLimits(tpot=500), True),
        (GoodputLimits(tpot=499), False),
        (GoodputLimits(e2el=5000), True),
        (GoodputLimits(e2el=4999), False),
        (GoodputLimits(ttft=1000, tpot=500, e2el=5000), True),
        (GoodputLimits(ttft=1000, tpot=499, e2el=5000), False),
    ],
)
def test_a_good_request_keeps_every_limit(limits: GoodputLimits, good: bool):
    outcome = answer([11.0, 15.0], [None] * 2, usage=9, last=15.0)
    assert limits.are_met(outcome) is good
    outcome.ending = Ending.CUT_OFF
    assert not limits.are_met(outcome)


def test_goodput_of_answers_without_a_figure():
    short, empty = answer([11.0], [None], 1, last=11.0), answer([], [], 0, last=11.0)
    assert GoodputLimits(tpot=1).are_met(short)
    assert GoodputLimits(e2el=1000).are_met(empty)
    assert not GoodputLimits(ttft=1e9).are_met(empty)


def test_limits_are_read_and_bad_ones_refused():
    assert parse_limits("ttft:500, tpot:50,e2el:5000.5") == GoodputLimits(500.0, 50.0, 5000.5)
    assert parse_limits("tpot:50") == GoodputLimits(tpot=50.0)
    for text in (
        "",
        "ttft",
        "ttft:",
        "ttft:x",
        "itl:5",
        "ttft:0",
        "ttft:-1",
        "ttft:nan",
        "ttft:inf",
        "ttft:1,ttft:2",
    ):
        with pytest.raises(RequestError, match="--goodput"):
            parse_limits(text)
