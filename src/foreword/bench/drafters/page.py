"""The grid as one page that needs nothing else: tables, and pictures drawn as SVG."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby

from foreword.bench.drafters.grid import Cell, GridRecord
from foreword.bench.drafters.measure import PLAIN

WIDTH, HEIGHT, MARGIN = 360, 200, 34
COLOURS = ("#4c78a8", "#e45756", "#54a24b", "#f58518", "#72b7b2", "#b279a2", "#9d755d", "#bab0ac")

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem }
:root { color-scheme: light dark }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .15rem .7rem; text-align: right }
th:first-child, td:first-child { text-align: left } tr { border-bottom: 1px solid #8884 }
.charts { display: flex; flex-wrap: wrap; gap: 1.5rem } svg text { font-size: 11px; fill: currentColor }
.key span { margin-right: 1rem } .key i { display: inline-block; width: .8em; height: .8em; margin-right: .3em }
"""

Lines = Mapping[str, Sequence[tuple[float, float]]]


def grid_page(
    records: Sequence[GridRecord], title: str, made: Mapping[str, str], cost_per_hour: float
) -> str:
    """Everything that was measured, by kind of work and temperature."""
    drafters = list(dict.fromkeys(record.drafter for record in records))
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(drafters)}
    key = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in colours.items()
    )
    about = ", ".join(f"{escape(name)} {escape(value)}" for name, value in made.items())
    ordered = sorted(records, key=lambda r: (r.category, r.temperature))
    sections = [
        _section(category, temperature, list(found), colours, cost_per_hour)
        for (category, temperature), found in groupby(ordered, key=lambda r: (r.category, r.temperature))
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    parts = [
        f'<!doctype html>\n<html lang="en">{head}',
        f"<h1>{escape(title)}</h1>",
        f"<p>{about}; a machine hour counts {cost_per_hour:g}</p>",
        f'<p class="key">{key}</p>',
        *sections,
        "</html>\n",
    ]
    return "\n".join(parts)


def speedups(records: Sequence[GridRecord]) -> dict[tuple[str, Cell], float]:
    """Tokens per second relative to plain decoding in the same cell, where that was measured."""
    plain = {record.cell: record.tokens_per_second for record in records if record.drafter == PLAIN}
    return {r.key: r.tokens_per_second / plain[r.cell] for r in records if r.cell in plain}


def _section(
    category: str,
    temperature: float,
    records: list[GridRecord],
    colours: Mapping[str, str],
    cost_per_hour: float,
) -> str:
    ratios = speedups(records)
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
    charts = "".join(
        (
            _chart("speed-up by requests at once", rates, colours),
            _chart("cost of a million tokens by requests at once", costs, colours),
            _chart(f"accepted up to guess k, {alone} at once", places, colours),
        )
    )
    rows = "".join(_row(record, ratios.get(record.key), cost_per_hour) for record in records)
    heads = [
        "drafter",
        "at once",
        "α",
        "τ",
        "tokens/s",
        "speed-up",
        "latency p50",
        "draft",
        "verify",
        "accept",
        "cost per million",
    ]
    head = "".join(f"<th>{name}</th>" for name in heads)
    return (
        f'<h2>{escape(category)}, temperature {temperature:g}</h2>\n<div class="charts">{charts}</div>\n'
        f"<table><tr>{head}</tr>{rows}</table>"
    )


def _row(record: GridRecord, ratio: float | None, cost_per_hour: float) -> str:
    shares = (record.draft_seconds, record.verify_seconds, record.accept_seconds)
    cells = (
        escape(record.drafter),
        str(record.concurrency),
        "" if record.drafter == PLAIN else f"{record.acceptance:.0%}",
        f"{record.tokens_per_pass:.2f}",
        f"{record.tokens_per_second:.1f}",
        "" if ratio is None else f"{ratio:.2f}",
        f"{record.latency_p50:.2f} s",
        *(f"{seconds / record.seconds:.0%}" for seconds in shares),
        f"{record.cost_per_million(cost_per_hour):.3g}",
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _chart(title: str, lines: Lines, colours: Mapping[str, str]) -> str:
    points = [point for line in lines.values() for point in line]
    if not points:
        return ""
    most_x, most_y = max(x for x, _ in points), max(*(y for _, y in points), 1e-9)

    def place(x: float, y: float) -> str:
        across = MARGIN + (WIDTH - 2 * MARGIN) * x / most_x
        return f"{across:.1f},{HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * y / most_y:.1f}"

    drawn = []
    for name, line in lines.items():
        colour, ordered = colours[name], [place(*point) for point in sorted(line)]
        joined = " ".join(ordered)
        drawn.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{joined}"/>')
        for x, y in (at.split(",") for at in ordered):
            told = f"<title>{escape(name)}</title>"
            drawn.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}">{told}</circle>')
    bottom, right = HEIGHT - MARGIN, WIDTH - MARGIN
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="{escape(title)}">',
        f'<path d="M{MARGIN} {MARGIN}V{bottom}H{right}" fill="none" stroke="currentColor"/>',
        *drawn,
        f'<text x="4" y="{MARGIN + 4}">{most_y:.3g}</text><text x="{right - 6}" y="{HEIGHT - 16}">{most_x:g}</text>',
        f'<text x="{MARGIN}" y="16">{escape(title)}</text></svg>',
    ]
    return "".join(parts)
