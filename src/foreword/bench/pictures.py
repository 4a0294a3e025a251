"""Pictures with matplotlib, an optional package, and self-contained HTML pages with tables and SVG charts."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

from foreword.errors import RequestError


def require_matplotlib() -> Any:  # noqa: ANN401 - an optional package
    """Return matplotlib; raise `RequestError` if it is not installed."""
    try:
        return importlib.import_module("matplotlib")
    except ImportError:
        advice = 'pip install "foreword[plot]", or pip install matplotlib'
        raise RequestError(f"--plot needs matplotlib: {advice}") from None


@contextmanager
def saved_figure(path: Path, width: float, height: float, title: str = "") -> Iterator[Any]:
    """Yield an empty figure of this size in inches; write it in the format of the file name after the block."""
    matplotlib, kind = require_matplotlib(), importlib.import_module("matplotlib.figure").Figure
    figure = kind(figsize=(width, height), layout="constrained")
    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        yield figure
    if title:
        figure.suptitle(title, fontsize=11)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise RequestError(f"--plot {path} cannot be written: {error}") from None


def draw_bars(
    axes: Any,  # noqa: ANN401 - an optional package
    heights: Mapping[str, Mapping[str, float]],
    level: tuple[float, str],
    form: str,
) -> None:
    """Draw groups of bars, and a dashed line at `level` with its label.

    `heights` are by name in the legend, then by group; `form` is the format of the figures above the bars.
    """
    groups = list(dict.fromkeys(group for by_group in heights.values() for group in by_group))
    width = 0.8 / len(heights)  # of a bar; a group is 1 wide
    for index, (name, by_group) in enumerate(heights.items()):
        offset = width * (index - (len(heights) - 1) / 2)  # from the middle of the group
        middles = [groups.index(group) + offset for group in by_group]
        bars = axes.bar(middles, list(by_group.values()), width, label=name)
        axes.bar_label(bars, fmt=form, fontsize=7, padding=1)
    _draw_level(axes, level)
    axes.set_xticks(range(len(groups)), groups, rotation=20, ha="right")


Line = Sequence[tuple[float, float]]  # points (x, y) in rising order of x

Lines = Mapping[str, Line]  # lines by name in the legend


@dataclass(frozen=True)
class Chart:
    """Lines over a common axis."""

    x_label: str
    y_label: str
    lines: Lines
    level: tuple[float, str] | None = None  # a dashed line and its label
    marked: Line = ()  # highlighted points


def _draw_level(axes: Any, level: tuple[float, str]) -> None:  # noqa: ANN401 - an optional package
    axes.axhline(level[0], color="black", linewidth=0.8, linestyle="--", label=level[1])


def save_charts(charts: Sequence[Chart], path: Path, title: str) -> None:
    """Draw the charts side by side, from zero up."""
    with saved_figure(path, 1.0 + 4.5 * len(charts), 4.2, title) as figure:
        for axes, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
            _draw(axes, chart)


def _draw(axes: Any, chart: Chart) -> None:  # noqa: ANN401 - an optional package
    for name, points in chart.lines.items():
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=4, label=name)
    if chart.level is not None:
        _draw_level(axes, chart.level)
    for x, y in chart.marked:
        axes.plot([x], [y], marker="o", markersize=11, fillstyle="none", color="black")
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)  # counts
    if len(chart.lines) > 1 or chart.level is not None:
        axes.legend(frameon=False, fontsize=8)


WIDTH, HEIGHT, MARGIN = 360, 200, 34  # of an SVG chart, in pixels
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


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for each name; all charts of a page use the same."""
    return dict(zip(names, cycle(COLOURS), strict=False))


def html_page(title: str, about: Sequence[str], colours: Mapping[str, str], sections: Sequence[str]) -> str:
    """Return an HTML page with a legend of the colours; `about` are paragraphs of plain text, `sections` are HTML."""
    key = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in colours.items()
    )
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    parts = [
        f'<!doctype html>\n<html lang="en">{head}',
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(paragraph)}</p>" for paragraph in about),
        f'<p class="key">{key}</p>',
        *sections,
        "</html>\n",
    ]
    return "\n".join(parts)


def section(title: str, charts: Sequence[str], heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return HTML of charts (SVG) side by side and a table below them, whose headings and cells are plain text."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<h2>{escape(title)}</h2>\n<div class="charts">{"".join(charts)}</div>\n'
        f"<table><tr>{head}</tr>{body}</table>"
    )


def chart(title: str, lines: Lines, colours: Mapping[str, str]) -> str:
    """Return a line chart as SVG, whose axes start at zero; empty if there are no points."""
    points = [point for line in lines.values() for point in line]
    if not points:
        return ""
    most_x, most_y = max(x for x, _ in points), max(*(y for _, y in points), 1e-9)
    bottom, right = HEIGHT - MARGIN, WIDTH - MARGIN

    def pixels(x: float, y: float) -> tuple[str, str]:
        """Return a point's coordinates in the picture, whose y grows downwards."""
        across = MARGIN + (right - MARGIN) * x / most_x
        down = bottom - (bottom - MARGIN) * y / most_y
        return f"{across:.1f}", f"{down:.1f}"

    drawn = []
    for name, line in lines.items():
        colour, tip = colours[name], f"<title>{escape(name)}</title>"
        places = [pixels(*point) for point in sorted(line)]
        joined = " ".join(map(",".join, places))
        drawn.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{joined}"/>')
        for x, y in places:
            drawn.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}">{tip}</circle>')
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="{escape(title)}">',
        f'<path d="M{MARGIN} {MARGIN}V{bottom}H{right}" fill="none" stroke="currentColor"/>',
        *drawn,
        f'<text x="4" y="{MARGIN + 4}">{most_y:.3g}</text><text x="{right - 6}" y="{HEIGHT - 16}">{most_x:g}</text>',
        f'<text x="{MARGIN}" y="16">{escape(title)}</text></svg>',
    ]
    return "".join(parts)
