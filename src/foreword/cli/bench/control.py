"""`foreword bench control`: whether the controller meets its goals."""

from pathlib import Path
from typing import Annotated

import typer

from foreword.cli.console import (
    DEFAULT_MODEL,
    BackendOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    PlotOption,
    load_llm,
    parse_sizes,
    print_json,
    stage_bar,
    stdout,
)


def control(
    model: ModelOption = DEFAULT_MODEL,
    dataset: Annotated[
        Path | None,
        typer.Option(help="JSON lines as in Spec-Bench, HumanEval or GSM8K. Default: the shipped prompts."),
    ] = None,
    kinds: Annotated[
        str, typer.Option(help="Prompt categories: chat,code; mixed is all of them at once. Default: all.")
    ] = "",
    batches: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "",
    fixed: Annotated[
        str,
        typer.Option(
            help="Fixed settings to compare with: names or JSON objects separated by commas. "
            "Default: the default drafter at several depths, and ngram."
        ),
    ] = "",
    windows: Annotated[
        int | None, typer.Option(help="Measured windows per category, batch and setting.")
    ] = None,
    changes: Annotated[
        bool, typer.Option(help="Also measure reactions to changes of load and traffic.")
    ] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Measure less: takes up to 15 minutes.")] = False,
    plot: PlotOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Compare the controller with plain decoding and fixed settings, by category and batch size.

    All take turns in short windows; ratios are of neighbouring windows. Then the traffic changes, a drafter becomes
    slow, another process takes a core, the batch grows. Exit code 1 if a goal is missed.
    """
    from foreword.bench.control.bench import ControlSizes, default_fixed, measure_control
    from foreword.bench.control.report import cell_table, goal_table, ratio_chart, reaction_table
    from foreword.bench.methods import parse_methods
    from foreword.bench.prompts import own_prompts, read_prompts

    sizes = ControlSizes.of(
        quick,
        [kind for kind in kinds.split(",") if kind],
        parse_sizes("--batches", batches, least=1) if batches else None,
        windows,
        changes,
    )
    prompts = own_prompts() if dataset is None else read_prompts(dataset)
    sizes.check({prompt.category for prompt in prompts})
    wanted = parse_methods(fixed) if fixed else None
    llm = load_llm(model, dtype, device, backend)
    settings = default_fixed(llm.loaded) if wanted is None else wanted
    with stage_bar() as on_progress:
        report = measure_control(llm.loaded, prompts, settings, sizes, on_progress)
    stdout.print(cell_table(report.cells, f"{model}: controller against fixed settings"))
    if report.reactions:
        stdout.print(reaction_table(report.reactions))
    if report.mixed is not None:
        mixed = report.mixed
        others = "" if mixed.others_gain is None else f"; the others {mixed.others_gain:.2f} of its speed"
        stdout.print(
            f"plain requests, half of a batch of {mixed.batch}: p95 {mixed.mixed_ms:.1f} ms a token, "
            f"{mixed.ratio:.2f} of an all-plain run ({mixed.gap_ratio:.2f} for single tokens){others}",
            soft_wrap=True,
        )
    if plot is not None:
        from foreword.bench.pictures import save_charts

        save_charts([ratio_chart(report.cells)], plot, f"{model}: controller against fixed settings")
        stdout.print(f"plot: {plot}", markup=False, soft_wrap=True)
    for failure in report.failures:
        stdout.print(f"[red]does not hold[/red]: {failure}", soft_wrap=True)
    stdout.print(goal_table(report.verdicts))
    if as_json:
        print_json({"model": model, **report.as_json()})
    if report.failures:
        raise typer.Exit(1)
