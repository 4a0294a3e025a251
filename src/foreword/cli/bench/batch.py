"""`foreword bench batch`: how decoding scales with the batch."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
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
    PlotOption,
    load_llm,
    parse_sizes,
    print_json,
    stage_bar,
    stdout,
)

if TYPE_CHECKING:
    from foreword.bench.batch import BatchRow


def batch(
    model: ModelOption = DEFAULT_MODEL,
    batches: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,2,4,8,16,32",
    tokens: Annotated[int, typer.Option(help="Mean number of tokens per request.")] = 32,
    repeats: Annotated[
        int, typer.Option(help="Runs, plain and speculative in turns; medians are reported.")
    ] = 3,
    speculative_config: Annotated[
        str, typer.Option(help="Drafter of the speculative runs, as a JSON object.")
    ] = '{"method": "ngram", "num_speculative_tokens": 4}',
    plot: PlotOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measure throughput, latency and host time per step by batch size, plain and speculative in turns.

    Greedy, on the shipped prompts, measured while the batch is full and all prompts are read. Host time is a
    step without drafting, the forward pass and acceptance.
    """
    sizes = parse_sizes("--batches", batches)
    from foreword.bench.batch import measure_batches
    from foreword.bench.prompts import own_prompts

    llm = load_llm(model, dtype, device, backend, speculative_config)
    prompts = [llm.encode(prompt.text) for prompt in own_prompts()]
    with stage_bar() as on_progress:
        rows = measure_batches(llm.engine, prompts, sizes, tokens, repeats, on_progress)
    stdout.print(_table(rows))
    if plot is not None:
        _plot(rows, plot, f"{model}: throughput by batch size")
    if as_json:
        print_json({"model": model, "rows": [asdict(row) for row in rows]})


def _table(rows: "Sequence[BatchRow]") -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("batch", justify="right", no_wrap=True)
    for kind, ratio in (("plain", f"x of {rows[0].batch}"), ("spec", "x plain")):
        for name in (f"{kind}\ntok/s", f"\n{ratio}", "\nms/tok", "\nhost"):
            table.add_column(name, justify="right", no_wrap=True)
    for name in ("alpha", "tau"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.batch),
            f"{row.plain_tokens_per_second:.1f}",
            f"{row.scaling:.2f}",
            f"{row.plain_token_ms:.1f}",
            f"{row.plain_host_ms:.2f}",
            f"{row.speculative_tokens_per_second:.1f}",
            f"{row.speedup:.2f}",
            f"{row.speculative_token_ms:.1f}",
            f"{row.speculative_host_ms:.2f}",
            f"{row.acceptance:.2f}",
            f"{row.tokens_per_pass:.2f}",
        )
    return table


def _plot(rows: "Sequence[BatchRow]", path: Path, title: str) -> None:
    from foreword.bench.pictures import Chart, save_charts

    lines = {
        "plain": [(float(row.batch), row.plain_tokens_per_second) for row in rows],
        "speculative": [(float(row.batch), row.speculative_tokens_per_second) for row in rows],
    }
    save_charts([Chart("requests at once", "tokens per second, all requests", lines)], path, title)
    stdout.print(f"plot: {path}", markup=False, soft_wrap=True)
