"""`foreword bench batch`: how decoding scales with the batch."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    from foreword.bench.skeleton import table

    llm = load_llm(model, dtype, device, backend, speculative_config)
    prompts = [llm.encode(prompt.text) for prompt in own_prompts()]
    with stage_bar() as on_progress:
        rows = measure_batches(llm.engine, prompts, sizes, tokens, repeats, on_progress)
    columns = {
        "batch": "{.batch}",
        "plain\ntok/s": "{.plain_tokens_per_second:.1f}",
        f"\nx of {rows[0].batch}": "{.scaling:.2f}",
        "\nms/tok": "{.plain_token_ms:.1f}",
        "\nhost": "{.plain_host_ms:.2f}",
        "spec\ntok/s": "{.speculative_tokens_per_second:.1f}",
        "\nx plain": "{.speedup:.2f}",
        "\nms/tok ": "{.speculative_token_ms:.1f}",
        "\nhost ": "{.speculative_host_ms:.2f}",
        "alpha": "{.acceptance:.2f}",
        "tau": "{.tokens_per_pass:.2f}",
    }
    stdout.print(table(rows, columns))
    if plot is not None:
        _plot(rows, plot, f"{model}: throughput by batch size")
    if as_json:
        print_json({"model": model, "rows": [asdict(row) for row in rows]})


def _plot(rows: "Sequence[BatchRow]", path: Path, title: str) -> None:
    from foreword.bench.pictures import Chart, save_charts

    lines = {
        "plain": [(float(row.batch), row.plain_tokens_per_second) for row in rows],
        "speculative": [(float(row.batch), row.speculative_tokens_per_second) for row in rows],
    }
    save_charts([Chart("requests at once", "tokens per second, all requests", lines)], path, title)
    stdout.print(f"plot: {path}", markup=False, soft_wrap=True)
