"""Latencies as a picture."""

import importlib
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from foreword.bench.plotting import require_matplotlib, save_figure
from foreword.bench.serve.formulas import gaps, time_to_first_token
from foreword.bench.serve.outcome import Ending, Outcome


def plot_latencies(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Two charts side by side, of completed requests: the distributions of TTFT and ITL, as cumulative shares."""
    require_matplotlib()
    figure_module = importlib.import_module("matplotlib.figure")
    completed = [outcome for outcome in outcomes if outcome.ending is Ending.COMPLETED]
    samples = {
        "TTFT": [value for outcome in completed if (value := time_to_first_token(outcome)) is not None],
        "ITL (gap between chunks)": list(chain.from_iterable(map(gaps, completed))),
    }
    figure = figure_module.Figure(figsize=(9.0, 4.0), layout="constrained")
    for axes, (name, seconds) in zip(figure.subplots(1, 2, sharey=True), samples.items(), strict=True):
        if seconds:
            axes.ecdf([1e3 * value for value in seconds])
        axes.set_xlabel(f"{name}, ms ({len(seconds)} values)")
        axes.set_ylabel("share of values up to this")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)
