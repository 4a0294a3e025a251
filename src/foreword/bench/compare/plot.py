"""The ratios as a picture."""

import importlib
from collections.abc import Sequence
from pathlib import Path

from foreword.bench.compare.summary import Row
from foreword.bench.plotting import require_matplotlib, save_figure


def plot_rows(rows: Sequence[Row], baseline: str, path: Path, title: str) -> None:
    """A bar per contestant with its interval, the baseline at 1."""
    require_matplotlib()
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(8, 1.2 + 0.4 * len(rows)), layout="constrained"
    )
    axes = figure.subplots()
    heights = [row.ratio.middle for row in rows]
    errors = [
        [row.ratio.middle - row.ratio.low for row in rows],
        [row.ratio.high - row.ratio.middle for row in rows],
    ]
    axes.barh([row.label for row in rows], heights, xerr=errors, color="#4c78a8", ecolor="black", capsize=3)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.invert_yaxis()
    axes.set_xlabel(f"tokens per second, {baseline} = 1")
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)
