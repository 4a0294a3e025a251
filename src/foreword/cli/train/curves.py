"""Plots of a training log."""

import json
from pathlib import Path

from foreword.bench.pictures import Chart, save_charts


def save_curves(log: Path, path: Path, title: str) -> None:
    """Loss and tokens per pass over the steps of a log."""
    entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    loss = [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]
    tau: dict[str, list[tuple[float, float]]] = {}
    for entry in entries:
        if "tau" in entry:
            tau.setdefault(entry["set"], []).append((entry["step"], entry["tau"]))
    charts = [
        Chart("steps", "loss of the first draft token", {"loss": loss}),
        Chart("steps", "tokens per pass", tau, level=(1.0, "plain decoding")),
    ]
    save_charts(charts, path, title)
