"""`foreword bench adapters`: the cost of LoRA adapters in a pass."""

from dataclasses import asdict
from typing import Annotated

import typer

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
    from foreword.bench.skeleton import Column, table

    llm = load_llm(model, dtype, device, backend)
    with progress_bar("measuring") as on_progress:
        costs = measure_adapters(llm.engine.target, batch, rank, repeats, on_progress)
    columns: dict[str, Column] = {
        "adapters": lambda cost: str(cost.adapters or "none"),
        "modules": "{.modules}",
        "ms": "{.ms:.2f}",
        "x none": "{.ratio:.3f}",
    }
    stdout.print(table(costs, columns, f"one pass over {batch} requests, rank {rank}"))
    if as_json:
        print_json({"model": model, "batch": batch, "rank": rank, "rows": [asdict(cost) for cost in costs]})
