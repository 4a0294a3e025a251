"""`foreword bench overhead`: the cost of drafting and of the engine's host code."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from foreword.bench.overhead import HostTime


def overhead(
    model: ModelOption = DEFAULT_MODEL,
    methods: Annotated[
        str, typer.Option(help="Drafters: names or JSON objects separated by commas; a+b combines.")
    ] = "ngram,suffix",
    contexts: Annotated[
        str, typer.Option(help="Context lengths in tokens, separated by commas.")
    ] = "100,1000,4000,7500",
    repeats: Annotated[int, typer.Option(help="Timed drafts at each length; the median is reported.")] = 15,
    batches: Annotated[
        str, typer.Option(help="Batch sizes for the host time, separated by commas.")
    ] = "1,8,32,128",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measure the time of a draft, the guard included, relative to target passes at the same context.

    Then the CPU time of an engine step, drafting included, on passes that take no time: versions can be compared on
    a busy machine. Last, for steps with drafts as on a GPU, the part of it that a device waits for.
    """
    lengths, sizes = parse_sizes("--contexts", contexts), parse_sizes("--batches", batches)
    from foreword.bench.methods import parse_methods
    from foreword.bench.overhead import VERIFY_ROWS, measure_host_time, measure_overhead
    from foreword.bench.skeleton import Column, table
    from foreword.bench.verdict_time import measure_verdicts

    wanted = parse_methods(methods)
    llm = load_llm(model, dtype, device, backend)
    with stage_bar() as on_progress:
        found = measure_overhead(llm, wanted, lengths, repeats, on_progress)
        host = measure_host_time(llm, sizes, repeats, on_progress)
        verdicts = measure_verdicts(llm.engine.target, sizes, repeats, on_progress)
    costs: dict[str, Column] = {
        "drafter": "{.drafter}",
        "context": "{.context}",
        "draft ms": "{.draft_ms:.3f}",
        "first ms": "{.first_ms:.1f}",
    }
    for count in VERIFY_ROWS:
        shown = f"{{0.shares[{count}]:.2%}} of {{0.verify_ms[{count}]:.1f}} ms"
        costs[f"of a pass over {count}"] = shown
    stdout.print(table(found, costs))
    stdout.print(_host_table(host, sizes))
    columns = {
        "host ms per step, drafter": "{.guesses}",
        "batch": "{.batch}",
        "tokens": "{.tokens:.1f}",
        "verdict": "{.verdict_ms:.2f}",
        "next pass": "{.launch_ms:.2f}",
        "together": "{.waited_ms:.2f}",
        "beside it": "{.beside_ms:.2f}",
    }
    stdout.print(table(verdicts, columns))
    if as_json:
        rows, times, parts = ([asdict(one) for one in some] for some in (found, host, verdicts))
        print_json({"model": model, "rows": rows, "host": times, "verdicts": parts})


def _host_table(host: "Sequence[HostTime]", batches: Sequence[int]) -> Table:
    table = Table("host ms per step (us per request)", box=SIMPLE_HEAD, padding=0)
    for batch in batches:
        table.add_column(f"batch {batch}", justify="right", no_wrap=True)
    for way in dict.fromkeys(one.way for one in host):
        times = [one for one in host if one.way == way]
        table.add_row(way, *(f"{one.step_ms:.2f} ({one.request_us:.0f})" for one in times))
    return table
