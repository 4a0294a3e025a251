"""The rows as a picture."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foreword.bench.drafters.summary import Row
from foreword.bench.plotting import require_matplotlib, save_figure


def plot_rows(rows: Sequence[Row], path: Path, title: str) -> None:
    """Two charts above each other, a group of bars for every category: τ and speed-up."""
    require_matplotlib()
    figure_module = importlib.import_module("matplotlib.figure")  # needs no display, keeps no global state
    categories = list(dict.fromkeys(row.category for row in rows))
    drafters = list(dict.fromkeys(row.drafter for row in rows))
    width = max(7.0, 1.2 + 0.3 * len(categories) * (len(drafters) + 1))
    figure = figure_module.Figure(figsize=(width, 7.0), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    _draw(upper, rows, "tau", "tokens per target pass (τ)")
    _draw(lower, rows, "speedup", "speed-up over plain decoding")
    figure.suptitle(title, fontsize=12)
    handles, labels = upper.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False)
    save_figure(figure, path)


def _draw(axes: Any, rows: Sequence[Row], field: str, label: str) -> None:  # noqa: ANN401 - an optional package
    categories = list(dict.fromkeys(row.category for row in rows))
    drafters = list(dict.fromkeys(row.drafter for row in rows))
    values = {(row.drafter, row.category): getattr(row, field) for row in rows}
    bar = 0.8 / len(drafters)
    for place, drafter in enumerate(drafters):
        here = [index for index, category in enumerate(categories) if (drafter, category) in values]
        heights = [values[drafter, categories[index]] for index in here]
        middles = [index + bar * (place - (len(drafters) - 1) / 2) for index in here]
        bars = axes.bar(middles, heights, bar, label=drafter)
        axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=1)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--", label="plain decoding")
    axes.set_ylabel(label)
    axes.set_xticks(range(len(categories)), categories, rotation=20, ha="right")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)
