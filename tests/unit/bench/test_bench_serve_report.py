"""A run summed up: nothing that failed is counted as an answer, and nothing is left unsaid."""

import json
from dataclasses import asdict

from rich.console import Console

from foreword.bench.serve.generator import ContentChunk, Ending, LoadRun, RequestOutcome
from foreword.bench.serve.report import GoodputLimits, TooManyRequests, make_report
from foreword.bench.serve.tables import latency_table, summary_table


def completed(ttft: float, usage: int | None = 3, tokens: int | None = None) -> RequestOutcome:
    chunks = [ContentChunk(ttft, tokens), ContentChunk(ttft + 0.2, tokens)]
    return RequestOutcome(
        0.0, 0.01, 1.0, Ending.COMPLETED, chunks=chunks, last_event_time=ttft + 0.2, usage_tokens=usage
    )


def failed(ending: Ending, status: int | None = None, retry_after: str | None = None) -> RequestOutcome:
    chunks = [ContentChunk(50.0, None), ContentChunk(90.0, None)]  # would spoil every percentile
    outcome = RequestOutcome(
        0.0, 0.01, 99.0, ending, f"why {status}", status, retry_after, chunks, last_event_time=90.0
    )
    outcome.usage_tokens = 1000
    return outcome


RUN = LoadRun(
    [
        completed(0.1),
        completed(0.3),
        completed(0.5, usage=None),
        completed(0.5, usage=None, tokens=4),
        failed(Ending.REFUSED, 429, "2"),
        failed(Ending.REFUSED, 429, "2"),
        failed(Ending.REFUSED, 429),
        failed(Ending.REFUSED, 503, "9"),
        failed(Ending.TIMEOUT),
        failed(Ending.CUT_OFF, 200),
        failed(Ending.NO_RESPONSE),
        failed(Ending.MALFORMED, 200),
        failed(Ending.DROPPED, 200),
        RequestOutcome(0.0, None, 1.0, Ending.NO_RESPONSE),
    ],
    seconds=4.0,
    loop_delays=[0.001],
)


def test_only_completed_requests_are_measured():
    report = make_report(RUN, GoodputLimits(ttft=300))
    assert (report.sent, report.completed, report.dropped) == (14, 4, 1)
    assert report.latencies["ttft"].n == report.latencies["e2el"].n == report.latencies["itl"].n == 4
    assert report.latencies["ttft"].max_ms == 500.0
    assert report.latencies["sent_late"].n == 13  # one never went out
    assert report.output_tokens == 3 + 3 + 2 + 8
    assert report.output_tokens_per_second == 4.0
    assert report.prompt_tokens is None
    assert report.goodput is not None
    assert (report.goodput.good, report.goodput.share) == (2, 2 / 13)


def test_failures_are_told_apart_and_429_with_what_it_promises():
    report = make_report(RUN, None)
    assert report.failures == {
        "HTTP 429": 3,
        "no response": 2,
        "HTTP 503": 1,
        "timeout": 1,
        "cut off by the server": 1,
        "malformed answer": 1,
    }
    assert report.failed == 9
    assert report.http_429 == TooManyRequests(3, 2, ("2",))
    assert report.failure_details["HTTP 503"] == "why 503"


def test_missing_usage_and_unknown_tokens_are_counted():
    report = make_report(RUN, None)
    assert (report.without_usage, report.counted_by_chunks, report.tokens_per_chunk_known) == (2, 1, 1)
    assert report.latencies["itl_per_token"].n == 4
    assert report.goodput is None


def test_a_report_is_json_without_infinities_also_when_nothing_was_answered():
    for run in (RUN, LoadRun([], 0.0, []), LoadRun([failed(Ending.TIMEOUT)], 1.0, [])):
        json.dumps(asdict(make_report(run, GoodputLimits(tpot=5))), allow_nan=False)


def test_an_answer_without_text_is_complete_and_tells_no_counts():
    empty = RequestOutcome(0.0, 0.01, 1.0, Ending.COMPLETED, last_event_time=0.4)
    report = make_report(LoadRun([empty, completed(0.1)], 1.0, []), None)
    assert (report.completed, report.without_usage, report.counted_by_chunks) == (2, 1, 1)
    assert (report.latencies["ttft"].n, report.tokens_per_chunk_known) == (1, 0)
    said = RequestOutcome(
        0.0, 0.01, 1.0, Ending.COMPLETED, last_event_time=0.4, chunks=[ContentChunk(0.2, 2)]
    )
    console = Console(width=200)
    with console.capture() as shown:
        console.print(summary_table(make_report(LoadRun([empty, said], 1.0, []), None), None))
    assert "ITL per token" not in shown.get()  # who said nothing has nothing to say about its tokens
    assert (report.latencies["ttft"].n, report.latencies["e2el"].n) == (1, 2)


def test_the_table_fits_a_narrow_terminal():
    console = Console(width=80, highlight=False)
    slow = LoadRun([completed(123.456789), completed(598.765)] * 500, 1.0, [12.3])
    with console.capture() as shown:
        console.print(latency_table(make_report(slow, None), "title"))
    assert "ITL per token" in shown.get()
    assert "…" not in shown.get()


def test_tables_say_what_the_figures_are_of():
    console = Console(width=160, highlight=False)
    report = make_report(RUN, GoodputLimits(ttft=300, e2el=9000))
    with console.capture() as shown:
        console.print(latency_table(report, "model [x] at y"))
        console.print(summary_table(report, GoodputLimits(ttft=300, e2el=9000)))
    text = shown.get()
    for words in (
        "model [x] at y",
        "14 sent, 4 completed",
        "9 failed, 1 disconnected on purpose",
        "2 requests, 15.4% of those not disconnected, 0.50 requests/s (ttft ≤ 300 ms, e2el ≤ 9000 ms)",
        "3 responses, 2 of them with Retry-After (2)",
        "2 answers without usage: tokens of 1 are counted by their token ids, tokens of 1 as one per chunk with text",
        "ITL per token covers 1 of 4 answers",
    ):
        assert words in text
