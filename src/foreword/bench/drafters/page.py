"""The grid as one page."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from foreword.bench.drafters.grid import Cell, GridRecord
from foreword.bench.drafters.measure import PLAIN
from foreword.bench.page import Lines, chart, colours_of, html_page, section

_HEADS = (
    "drafter",
    "at once",
    "α",
    "τ",
    "tokens/s",
    "speed-up",
    "by CPU time",
    "latency p50",
    "draft",
    "verify",
    "accept",
    "cost per million",
)


def grid_page(
    records: Sequence[GridRecord], title: str, made: Mapping[str, str], cost_per_hour: float
) -> str:
    """Everything that was measured, by kind of work and temperature."""
    colours = colours_of(list(dict.fromkeys(record.drafter for record in records)))
    about = ", ".join(f"{name} {value}" for name, value in made.items())
    ordered = sorted(records, key=lambda r: (r.category, r.temperature))
    sections = [
        _section(category, temperature, list(found), colours, cost_per_hour)
        for (category, temperature), found in groupby(ordered, key=lambda r: (r.category, r.temperature))
    ]
    return html_page(title, [f"{about}; a machine hour counts {cost_per_hour:g}"], colours, sections)


def speedups(records: Sequence[GridRecord]) -> dict[tuple[str, Cell], float]:
    """Tokens per second relative to plain decoding in the same cell, where that was measured."""
    plain = {record.cell: record.tokens_per_second for record in records if record.drafter == PLAIN}
    return {r.key: r.tokens_per_second / plain[r.cell] for r in records if r.cell in plain}


def cpu_speedups(records: Sequence[GridRecord]) -> dict[tuple[str, Cell], float]:
    """The same by the processor's time, where it does the work."""
    timed = [record for record in records if record.cpu_seconds]
    return speedups([replace(record, seconds=record.cpu_seconds) for record in timed])


def _section(
    category: str,
    temperature: float,
    records: list[GridRecord],
    colours: Mapping[str, str],
    cost_per_hour: float,
) -> str:
    ratios, by_cpu = speedups(records), cpu_speedups(records)
    by_drafter = {name: [r for r in records if r.drafter == name] for name in colours}
    rates: Lines = {n: [(r.concurrency, ratios.get(r.key, 0.0)) for r in rs] for n, rs in by_drafter.items()}
    costs: Lines = {
        n: [(r.concurrency, r.cost_per_million(cost_per_hour)) for r in rs] for n, rs in by_drafter.items()
    }
    alone = min(r.concurrency for r in records)
    places: Lines = {
        n: [(k + 1, share) for r in rs if r.concurrency == alone for k, share in enumerate(r.per_position)]
        for n, rs in by_drafter.items()
        if n != PLAIN
    }
    charts = [
        chart("speed-up by requests at once", rates, colours),
        chart("cost of a million tokens by requests at once", costs, colours),
        chart(f"accepted up to guess k, {alone} at once", places, colours),
    ]
    rows = [_row(r, ratios.get(r.key), by_cpu.get(r.key), cost_per_hour) for r in records]
    return section(f"{category}, temperature {temperature:g}", charts, _HEADS, rows)


def _row(
    record: GridRecord, ratio: float | None, by_cpu: float | None, cost_per_hour: float
) -> tuple[str, ...]:
    shares = (record.draft_seconds, record.verify_seconds, record.accept_seconds)
    return (
        record.drafter,
        str(record.concurrency),
        "" if record.drafter == PLAIN else f"{record.acceptance:.0%}",
        f"{record.tokens_per_pass:.2f}",
        f"{record.tokens_per_second:.1f}",
        *("" if found is None else f"{found:.2f}" for found in (ratio, by_cpu)),
        f"{record.latency_p50:.2f} s",
        *(f"{seconds / record.seconds:.0%}" for seconds in shares),
        f"{record.cost_per_million(cost_per_hour):.3g}",
    )
