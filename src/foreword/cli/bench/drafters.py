"""`foreword bench drafters`: acceptance and speed-up of each drafter, by category."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreword import __version__
from foreword.cli.console import (
    DEFAULT_MODEL,
    BackendOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    load_llm,
    print_json,
    stage_bar,
    stdout,
)
from foreword.cli.options.common import check_plot
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.bench.drafters.decode import Record
    from foreword.bench.drafters.measure import DrafterBench, Ledger
    from foreword.bench.prompts import BenchPrompt
    from foreword.engine.llm import LLM


def drafters(
    model: ModelOption = DEFAULT_MODEL,
    dataset: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSON lines as in Spec-Bench, HumanEval or GSM8K; repeatable. Default: the shipped prompts."
        ),
    ] = None,
    limit_per_category: Annotated[
        int | None, typer.Option(help="Use the first N prompts of each category. Default: all.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 64,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue to --max-tokens after an end token.")
    ] = False,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Drafters: names or JSON objects separated by commas; a+b combines; default is that of --speculation "
            "auto. Default: all that need no settings."
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(help="Runs of each drafter and prompt; the median is reported.")
    ] = 1,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of every answer.")] = 0,
    history: Annotated[
        bool, typer.Option("--history", help="Let drafters learn from earlier answers of the run.")
    ] = False,
    resume: Annotated[
        Path | None, typer.Option(help="Store measurements in this file and skip those that it has.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(callback=check_plot, help="Draw τ and speed-up into this PNG file.")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Concurrent requests of the grid, such as 1,4,16.")
    ] = None,
    temperatures: Annotated[
        str | None, typer.Option(help="Temperatures of the grid, such as 0,0.7,1.")
    ] = None,
    cost_per_hour: Annotated[
        float,
        typer.Option(min=0.0, help="Price of this machine per hour, for the cost of a million tokens."),
    ] = 1.0,
    page: Annotated[
        Path | None, typer.Option(help="Write the grid into this self-contained HTML file.")
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measure acceptance, tokens per pass and speed-up of each drafter, by category.

    Every prompt is decoded plainly and with every drafter, in turn; the texts are the same.

    With --concurrency, --temperatures or --page: a grid of category, temperature and concurrent requests, with
    acceptance by position, latency, time split and the cost of a million tokens.
    """
    if concurrency is not None or temperatures is not None or page is not None:
        from foreword.cli.bench.drafter_grid import GridOptions, drafter_grid

        options = GridOptions(
            model, dataset, limit_per_category, max_tokens, ignore_eos, methods, seed, concurrency, temperatures,
            cost_per_hour, resume, page, dtype, device, backend, as_json,
        )  # fmt: skip
        drafter_grid(options)
        return
    from foreword.bench.drafters.measure import BenchSettings, DrafterBench
    from foreword.bench.drafters.summary import drafter_table, plot_rows, slowest_prompts, summarise
    from foreword.bench.methods import DEFAULT, default_methods, is_random, parse_methods
    from foreword.bench.prompts import bench_prompts

    settings = BenchSettings(max_tokens, temperature, seed, repeats, history, ignore_eos)
    settings.sampling()  # refuses bad parameters before anything is loaded
    if history and resume is not None:
        raise RequestError(
            "--history and --resume exclude each other: what drafters learned is not in the file"
        )
    wanted = None if methods is None else parse_methods(methods)
    prompts = bench_prompts(dataset, limit_per_category)
    llm = load_llm(model, dtype, device, backend)
    made_with = {"model": model, "dtype": dtype, "device": device, **asdict(settings)}
    ledger = _ledger(resume, llm, made_with)
    if wanted is None:
        guesses = llm.loaded.choose_speculation("auto").config is not None
        wanted = [DEFAULT, *default_methods()] if guesses else default_methods()
    bench = DrafterBench(llm, wanted, settings)
    records = _measure(bench, prompts, [method.label for method in wanted], ledger)
    rows = summarise(records)
    title = f"{model}, {len(prompts)} prompts × up to {max_tokens} tokens, plain decoding = 1"
    stdout.print(drafter_table(rows, title))
    slowest = slowest_prompts([record for record in records if not is_random(record.drafter)])
    for one in slowest:
        stdout.print(one.line, highlight=False, soft_wrap=True)
    if plot is not None:
        plot_rows(rows, plot, title)
        stdout.print(f"plot: {plot}", soft_wrap=True)
    if as_json:
        found = {"rows": [row.as_json() for row in rows], "slowest": [one.as_json() for one in slowest]}
        print_json({**made_with, **found})


def _ledger(path: Path | None, llm: "LLM", settings: dict[str, Any]) -> "Ledger[Record] | None":
    from foreword.bench.drafters.measure import Ledger

    if path is None:
        return None
    from foreword.bench.drafters.decode import Record

    decoder = type(llm.engine.target).__name__
    return Ledger(path, {"version": __version__, "decoder": decoder, **settings}, Record.from_json)


def _measure(
    bench: "DrafterBench", prompts: "list[BenchPrompt]", labels: list[str], ledger: "Ledger[Record] | None"
) -> "list[Record]":
    """The records of these prompts and drafters, those from the file included."""
    keys = {prompt.key for prompt in prompts}
    known = [] if ledger is None else ledger.records
    records = [record for record in known if record.prompt in keys and record.drafter in labels]
    with stage_bar() as show:

        def on_progress(category: str, done: int, total: int, drafter: str) -> None:
            show(f"{drafter}, {category}, prompt {done + 1} of {total}", done, total)

        for record in bench.measure(prompts, records, on_progress):
            records.append(record)
            if ledger is not None:
                ledger.add(record)
    order = {label: place for place, label in enumerate(labels)}
    return sorted(records, key=lambda record: order[record.drafter])
