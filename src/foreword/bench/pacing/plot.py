"""Both cadences of one stream, and how well prompts are told apart by each."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foreword.bench.pacing.fingerprint import Guessing
from foreword.bench.pacing.traces import Chunk
from foreword.bench.plotting import require_matplotlib, save_figure

_SHOWN_SECONDS = 1.0


def plot_pacing(examples: dict[str, Sequence[Chunk]], rows: Sequence[Guessing], path: Path) -> None:
    """Left: chunks on the wire, by kind of stream. Right: accuracy of the classifier."""
    require_matplotlib()
    figure_module = importlib.import_module("matplotlib.figure")  # needs no display, keeps no global state
    figure = figure_module.Figure(figsize=(11.0, 5.0), layout="constrained")
    grid = figure.add_gridspec(len(examples), 2, width_ratios=(3, 2))
    first = None
    for place, (name, chunks) in enumerate(examples.items()):
        axes = figure.add_subplot(grid[place, 0], sharex=first)
        first = first or axes
        _draw_chunks(axes, name, chunks)
    axes.set_xlabel("milliseconds after the first token")
    _draw_accuracy(figure.add_subplot(grid[:, 1]), rows)
    save_figure(figure, path)


def _draw_chunks(axes: Any, name: str, chunks: Sequence[Chunk]) -> None:  # noqa: ANN401 - an optional package
    shown = [chunk for chunk in chunks if chunk.time <= _SHOWN_SECONDS]
    axes.vlines([1e3 * chunk.time for chunk in shown], 0, [chunk.size for chunk in shown], linewidth=1.5)
    axes.set_ylim(0, 1.15 * max(chunk.size for chunk in shown))
    axes.set_ylabel("bytes")
    axes.set_title(name, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_accuracy(axes: Any, rows: Sequence[Guessing]) -> None:  # noqa: ANN401 - an optional package
    kinds = list(dict.fromkeys(row.features for row in rows))
    streams = list(dict.fromkeys(row.stream for row in rows))
    width = 0.8 / len(streams)
    for place, stream in enumerate(streams):
        heights = [100 * row.accuracy for row in rows if row.stream == stream]
        middles = [index + width * (place - (len(streams) - 1) / 2) for index in range(len(kinds))]
        axes.bar_label(axes.bar(middles, heights, width, label=stream), fmt="%.0f", fontsize=8, padding=1)
    axes.axhline(100 * rows[0].chance, color="black", linewidth=0.8, linestyle="--", label="chance")
    axes.set_xticks(range(len(kinds)), kinds, rotation=15, ha="right")
    axes.set_ylabel("prompts named right, %")
    axes.set_ylim(0, 110)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes.spines[["top", "right"]].set_visible(False)
