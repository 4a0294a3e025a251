"""Shows the report of a load test as tables and as a plot."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple
from itertools import chain
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from foreword.bench.pictures import saved_figure
from foreword.bench.serve.generator import Ending, RequestOutcome
from foreword.bench.serve.report import PERCENTILES, Goodput, GoodputLimits, Report, gaps, time_to_first_token
from foreword.bench.skeleton import optional

ROWS = {  # name of the latency -> label of its row
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "itl_per_token": "ITL per token",
    "e2el": "E2E",
    "sent_late": "send lag",
    "read_late": "read lag",
}
LAG_NOTE = "send lag and read lag: delays of the load generator itself"


def latency_table(report: Report, title: str) -> Table:
    """Return a table of latencies in milliseconds, with the number of values."""
    headings = ["ms", "n", "mean", *(f"p{percent}" for percent in PERCENTILES), "max"]
    table = Table(*headings, title=escape(title), caption=LAG_NOTE)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for name, label in ROWS.items():
        count, *times = astuple(report.latencies[name])
        table.add_row(label, str(count), *map(_short, times))
    return table


def _short(ms: float | None) -> str:
    """Format a time with few digits, for a narrow terminal."""
    if ms is None:
        return "-"
    if ms >= 1000:
        return f"{ms:.0f}"
    return f"{ms:.2f}" if ms < 100 else f"{ms:.1f}"


def summary_table(report: Report, limits: GoodputLimits | None) -> Table:
    """Return a table of counts, rates, goodput and failures, one row each."""
    table = Table.grid(padding=(0, 2))
    for name, text in _lines(report, limits):
        table.add_row(escape(name), escape(text))
    return table


def _lines(report: Report, limits: GoodputLimits | None) -> Iterator[tuple[str, str]]:
    yield (
        "requests",
        f"{report.sent} sent, {report.completed} completed (latencies and rates are of these), "
        f"{report.failed} failed, {report.dropped} disconnected on purpose",
    )
    yield "time", f"{report.seconds:.2f} s"
    rates = report.requests_per_second, report.output_tokens_per_second
    yield "throughput", f"{rates[0]:.2f} requests/s, {rates[1]:.1f} output tokens/s"
    prompt = "unknown" if report.prompt_tokens is None else str(report.prompt_tokens)
    yield "tokens", f"{report.output_tokens} output, {prompt} prompt"
    if limits is not None and report.goodput is not None:
        yield "goodput", _goodput(report.goodput, limits)
    for kind, count in report.failures.items():
        yield f"failed: {kind}", f"{count} ({report.failure_details[kind] or 'no message'})"
    yield from _notes(report)


def _goodput(goodput: Goodput, limits: GoodputLimits) -> str:
    bounds = asdict(limits).items()
    named = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in bounds if limit is not None)
    share = optional(goodput.share, ".1%")
    rate = f"{goodput.requests_per_second:.2f} requests/s"
    return f"{goodput.good} requests, {share} of those not disconnected, {rate} ({named})"


def _notes(report: Report) -> Iterator[tuple[str, str]]:
    if (refused := report.http_429).count:
        values = f" ({', '.join(refused.retry_after)})" if refused.retry_after else ""
        yield (
            "HTTP 429",
            f"{refused.count} responses, {refused.with_retry_after} of them with Retry-After{values}",
        )
    if report.without_usage:
        by_tokens = report.without_usage - report.counted_by_chunks
        yield (
            "note",
            f"{report.without_usage} answers without usage: tokens of {by_tokens} are counted by their token ids, "
            f"tokens of {report.counted_by_chunks} as one per chunk with text",
        )
    known, with_text = report.tokens_per_chunk_known, report.latencies["ttft"].n
    if 0 < known < with_text:
        yield (
            "note",
            f"ITL per token covers {known} of {with_text} answers: "
            "the chunks of the other answers do not state their number of tokens",
        )
    elif known < with_text:
        yield "note", "ITL per token is unknown: the chunks do not state their number of tokens"
    if report.drops_too_late:
        yield "note", f"{report.drops_too_late} answers were complete before they could be disconnected"


def plot_latencies(outcomes: Sequence[RequestOutcome], path: Path, title: str) -> None:
    """Draw cumulative distributions of TTFT and ITL of completed requests."""
    completed = [outcome for outcome in outcomes if outcome.ending is Ending.COMPLETED]
    samples = {
        "TTFT": [value for outcome in completed if (value := time_to_first_token(outcome)) is not None],
        "ITL (gap between chunks)": list(chain.from_iterable(map(gaps, completed))),
    }
    with saved_figure(path, 9.0, 4.0, title) as figure:
        for axes, (name, seconds) in zip(figure.subplots(1, 2, sharey=True), samples.items(), strict=True):
            if seconds:
                axes.ecdf([1e3 * value for value in seconds])
            axes.set_xlabel(f"{name}, ms ({len(seconds)} values)")
            axes.set_ylabel("fraction of values up to this")
