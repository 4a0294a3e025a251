"""`foreword bench adapters`: the cost of LoRA adapters in a pass."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from foreword.cli.console import (
    DEFAULT_MODEL,
    BackendOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    load_llm,
    print_json,
    progress_bar,
    stdout,
)


def adapters(
    model: ModelOption = DEFAULT_MODEL,
    batch: Annotated[int, typer.Option(help="Requests at once, each with an adapter of its own.")] = 8,
    rank: Annotated[int, typer.Option(help="Rank of the adapters, which have random weights.")] = 16,
    repeats: Annotated[int, typer.Option(help="Timed rounds; the median is reported.")] = 25,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measure a decoding pass with LoRA adapters against the same pass without, in turns."""
    from foreword.bench.pass_costs import measure_adapters

    llm = load_llm(model, dtype, device, backend)
    with progress_bar("measuring") as on_progress:
        costs = measure_adapters(llm.engine.target, batch, rank, repeats, on_progress)
    table = Table("adapters", "modules", "ms", "x none", title=f"one pass over {batch} requests, rank {rank}")
    for cost in costs:
        table.add_row(str(cost.adapters or "none"), cost.modules, f"{cost.ms:.2f}", f"{cost.ratio:.3f}")
    stdout.print(table)
    if as_json:
        print_json({"model": model, "batch": batch, "rank": rank, "rows": [asdict(cost) for cost in costs]})
