"""`foreword bench structured`: cost and gain of structured output."""

from dataclasses import asdict
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
    load_llm,
    print_json,
    progress_bar,
    stdout,
)
from foreword.cli.options.common import SpeculationOption, json_object, read_text, speculation_choice


def structured(
    model: ModelOption = DEFAULT_MODEL,
    batch: Annotated[int, typer.Option(help="Concurrent requests.")] = 8,
    tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 96,
    repeats: Annotated[int, typer.Option(help="Timed rounds; the median is reported.")] = 3,
    json_schema: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON schema to use instead of the built-in one with long keys."),
    ] = None,
    speculation: SpeculationOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Compare tokens per second and per pass with and without a schema, with and without speculation, in turns."""
    from foreword.bench.skeleton import table
    from foreword.bench.structured import measure_structured

    schema = None if json_schema is None else json_object("--json-schema", read_text(json_schema))
    llm = load_llm(model, dtype, device, backend, speculation_choice(speculation, None))
    with progress_bar("measuring") as on_progress:
        costs = measure_structured(llm.engine, llm.encode, batch, tokens, repeats, on_progress, schema)
    title = f"{batch} requests; the schema adds {costs.mask_share:.1%} to a plain step"
    columns = {
        "": "{.way}",
        "tokens/s": "{.tokens_per_second:.1f}",
        "tokens per pass": "{.tokens_per_pass:.2f}",
        "step ms": "{.step_ms:.2f}",
        "outside the pass ms": "{.beside_ms:.2f}",
        "ratio to plain": "{.ratio:.2f}",
    }
    stdout.print(table(costs.rows, columns, title))
    if as_json:
        print_json({"model": model, **asdict(costs)})
