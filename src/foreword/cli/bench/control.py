"""`foreword bench control`: whether the controller meets its goals."""

from dataclasses import dataclass
from pathlib import Path

import typer

from foreword.cli.bench.common import BATCH_SIZES, DATASET, Benchmark, draw, prompts_of
from foreword.cli.console import parse_sizes, plot_option, stage_bar, stdout
from foreword.cli.options.grouped import flag, option


@dataclass(frozen=True, kw_only=True)
class Control(Benchmark):
    """Compare the controller with plain decoding and fixed settings, by category and batch size.

    All take turns in short windows; ratios are of neighbouring windows. Then the traffic changes, a drafter becomes
    slow, another process takes a core, the batch grows. Exit code 1 if a goal is missed.
    """

    dataset: Path | None = option(None, DATASET)
    kinds: str = option("", "Prompt categories: chat,code; mixed is all of them at once. Default: all.")
    batches: str = option("", BATCH_SIZES)
    fixed: str = option(
        "",
        "Fixed settings to compare with: names or JSON objects separated by commas. "
        "Default: the default drafter at several depths, and ngram.",
    )
    windows: int | None = option(None, "Measured windows per category, batch and setting.")
    changes: bool = option(True, "Also measure reactions to changes of load and traffic.")
    quick: bool = flag("Measure less: takes up to 15 minutes.")
    plot: Path | None = plot_option()

    def run(self) -> None:
        from foreword.bench.control.bench import ControlSizes, default_fixed, measure_control
        from foreword.bench.control.report import cell_table, goal_table, ratio_chart, reaction_table
        from foreword.bench.methods import parse_methods
        from foreword.bench.pictures import save_charts

        sizes = ControlSizes.of(
            self.quick,
            [kind for kind in self.kinds.split(",") if kind],
            parse_sizes("--batches", self.batches, least=1) if self.batches else None,
            self.windows,
            self.changes,
        )
        prompts = prompts_of(self.dataset)
        sizes.check({prompt.category for prompt in prompts})
        wanted = parse_methods(self.fixed) if self.fixed else None
        llm = self.load()
        settings = default_fixed(llm.loaded) if wanted is None else wanted
        with stage_bar() as show:
            report = measure_control(llm.loaded, prompts, settings, sizes, show)
        title = f"{self.model}: controller against fixed settings"
        stdout.print(cell_table(report.cells, title))
        if report.reactions:
            stdout.print(reaction_table(report.reactions))
        if report.mixed is not None:
            stdout.print(report.mixed.line, soft_wrap=True)
        draw(self.plot, lambda path: save_charts([ratio_chart(report.cells)], path, title))
        for failure in report.failures:
            stdout.print(f"[red]does not hold[/red]: {failure}", soft_wrap=True)
        stdout.print(goal_table(report.verdicts))
        self.show_json({"model": self.model, **report.as_json()})
        if report.failures:
            raise typer.Exit(1)
