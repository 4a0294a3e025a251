"""`foreword bench overhead`: what guessing itself costs."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from foreword.cli.console import (
    DEFAULT_MODEL,
    BackendOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    load_llm,
    parse_sizes,
    print_json,
    stage_bar,
    stdout,
)


def overhead(
    model: ModelOption = DEFAULT_MODEL,
    methods: Annotated[
        str, typer.Option(help="Names or JSON objects separated by commas; a+b combines.")
    ] = "ngram,suffix",
    contexts: Annotated[
        str, typer.Option(help="Lengths of context, separated by commas.")
    ] = "100,1000,4000,7500",
    repeats: Annotated[int, typer.Option(help="Timed drafts at each length; the median counts.")] = 15,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Milliseconds of one draft, the guard's included, relative to target passes at the same context."""
    lengths = parse_sizes("--contexts", contexts)
    from foreword.bench.drafters.methods import parse_methods
    from foreword.bench.drafters.overhead import VERIFY_ROWS, measure_overhead

    wanted = parse_methods(methods)
    llm = load_llm(model, dtype, device, backend)
    with stage_bar() as on_progress:
        found = measure_overhead(llm, wanted, lengths, repeats, on_progress)
    table = Table("drafter", "context", box=SIMPLE_HEAD, padding=0)
    for name in ("draft ms", "first ms", *(f"of a pass over {rows}" for rows in VERIFY_ROWS)):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        shares = [f"{one.share(rows):.2%} of {one.verify_ms[rows]:.1f} ms" for rows in VERIFY_ROWS]
        table.add_row(one.drafter, str(one.context), f"{one.draft_ms:.3f}", f"{one.first_ms:.1f}", *shares)
    stdout.print(table)
    if as_json:
        print_json({"model": model, "rows": [asdict(one) for one in found]})
