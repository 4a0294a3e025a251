"""What `foreword train` prints at the end: tokens per pass by kind of text, expected speed-up, and how to use it."""

import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from foreword.bench.draft_depths import measure_depth_times
from foreword.bench.skeleton import Column, table
from foreword.cli.console import say, stdout
from foreword.train.loop.evaluate import TauReport
from foreword.train.loop.output import drafter_config

if TYPE_CHECKING:
    from foreword.cli.train.main import CommonOptions


def show_summary(options: "CommonOptions", method: str, reports: Mapping[str, TauReport]) -> None:
    """Print tokens per pass and expected speed-up by kind of text, the best depth, and the command to use it."""
    drafter = drafter_config(method, str(options.out))
    report = next(iter(reports.values()), None)
    if report is not None and options.speed:
        depths = range(1, report.depth + 1)
        times = measure_depth_times(options.model, options.device, drafter, depths)
        plain, drafted = (1000 * times.seconds[depth] for depth in (0, report.depth))
        rows = [*report.by_kind().items(), ("all", report.tau())]
        columns: dict[str, Column] = {
            "kind of text": "{0[0]}",
            "τ": "{0[1]:.2f}",
            "expected speed-up": lambda row: f"{times.speed_up(row[1], report.depth):.2f}×",
        }
        say(
            f"{report.depth} draft tokens: {drafted:.1f} ms per pass with its draft; plain: {plain:.1f} ms per pass"
        )
        stdout.print(table(rows, columns))
        best, speed = times.best(report.by_level)
        say(f"best: {best} draft tokens, {speed:.2f}× expected" if best else "plain decoding is faster here")
    model = shlex.quote(str(options.model))
    say(f"foreword generate 'Hello.' --model {model} --speculation {shlex.quote(json.dumps(drafter))}")
