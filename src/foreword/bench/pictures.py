"""Pictures of measurements, drawn with matplotlib, which is optional."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreword.errors import RequestError


def require_matplotlib() -> Any:  # noqa: ANN401 - an optional package
    """Return matplotlib; raise `RequestError` with instructions if missing."""
    try:
        return importlib.import_module("matplotlib")
    except ImportError:
        raise RequestError(
            '--plot needs matplotlib: pip install "foreword[plot]", or pip install matplotlib'
        ) from None


def new_figure(width: float, height: float) -> Any:  # noqa: ANN401 - an optional package
    """Return an empty figure of this size in inches, without display or global state."""
    require_matplotlib()
    figure = importlib.import_module("matplotlib.figure").Figure
    return figure(figsize=(width, height), layout="constrained")


def draw_bars(
    axes: Any,  # noqa: ANN401 - an optional package
    heights: Mapping[str, Mapping[str, float]],
    level: tuple[float, str],
    form: str,
) -> None:
    """Draw labelled groups of bars, `heights` by legend and group, and a dashed line at `level`."""
    groups = list(dict.fromkeys(group for own in heights.values() for group in own))
    width = 0.8 / len(heights)
    for place, (name, own) in enumerate(heights.items()):
        middles = [groups.index(group) + width * (place - (len(heights) - 1) / 2) for group in own]
        bars = axes.bar(middles, list(own.values()), width, label=name)
        axes.bar_label(bars, fmt=form, fontsize=7, padding=1)
    axes.axhline(level[0], color="black", linewidth=0.8, linestyle="--", label=level[1])
    axes.set_xticks(range(len(groups)), groups, rotation=20, ha="right")
    axes.spines[["top", "right"]].set_visible(False)


def save_figure(figure: Any, path: Path) -> None:  # noqa: ANN401 - an optional package
    """Write the figure in the format of the file name."""
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise RequestError(f"--plot {path} cannot be written: {error}") from None


Line = Sequence[tuple[float, float]]
"""Points (x, y), by x."""


@dataclass(frozen=True)
class Chart:
    """Lines over a common axis."""

    x_label: str
    y_label: str
    lines: Mapping[str, Line]  # by legend
    level: tuple[float, str] | None = None  # a dashed line and its label
    marked: Line = ()  # highlighted points


def save_charts(charts: Sequence[Chart], path: Path, title: str) -> None:
    """Draw the charts side by side, from zero up."""
    figure = new_figure(1.0 + 4.5 * len(charts), 4.2)
    for axes, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
        _draw(axes, chart)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)


def _draw(axes: Any, chart: Chart) -> None:  # noqa: ANN401 - an optional package
    for name, points in chart.lines.items():
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=4, label=name)
    if chart.level is not None:
        height, meaning = chart.level
        axes.axhline(height, color="black", linewidth=0.8, linestyle="--", label=meaning)
    for x, y in chart.marked:
        axes.plot([x], [y], marker="o", markersize=11, fillstyle="none", color="black")
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)  # counts
    axes.spines[["top", "right"]].set_visible(False)
    if len(chart.lines) > 1 or chart.level is not None:
        axes.legend(frameon=False, fontsize=8)
