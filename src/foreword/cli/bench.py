"""`foreword bench`: measure it."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from foreword.cli import bench_drafters, bench_overhead
from foreword.cli.console import (
    DEFAULT_MODEL,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    load_llm,
    parse_numbers,
    print_json,
    progress_bar,
    stdout,
)

app = typer.Typer(no_args_is_help=True, help="Measure costs and speed, always as ratios within one run.")


@app.callback()
def _group() -> None:
    """Measure costs and speed, always as ratios within one run."""


app.command("drafters")(bench_drafters.drafters)
app.command("overhead")(bench_overhead.overhead)


@app.command("step")
def step(
    model: ModelOption = DEFAULT_MODEL,
    tokens: Annotated[str, typer.Option(help="Numbers of new tokens, separated by commas.")] = "1,2,4,8,16",
    context: Annotated[int, typer.Option(help="Committed tokens before the new ones.")] = 256,
    repeats: Annotated[int, typer.Option(help="Timed passes for each number; the median counts.")] = 15,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Milliseconds of one target pass over n new tokens, and the ratio to the first n.

    Verifying a guess of n-1 tokens costs a pass over n: the flatter this curve, the more speculation pays.
    """
    from foreword.bench.step_cost import measure_step_cost

    sizes = parse_numbers("--tokens", tokens)
    llm = load_llm(model, dtype, device)
    with progress_bar("measuring") as on_progress:
        costs = measure_step_cost(
            llm.engine.target, sizes, context=context, repeats=repeats, progress=on_progress
        )
    table = Table("n", "ms", "ratio", title=f"one pass over n new tokens, context {context}")
    for cost in costs:
        table.add_row(str(cost.n), f"{cost.ms:.2f}", f"{cost.ratio:.2f}")
    stdout.print(table)
    if as_json:
        print_json({"model": model, "context": context, "rows": [asdict(cost) for cost in costs]})
