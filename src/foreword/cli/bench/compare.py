"""`foreword bench compare`: Foreword against other engines."""

from pathlib import Path
from typing import Annotated

import typer

from foreword.cli.bench.made import made
from foreword.cli.console import (
    DEFAULT_MODEL,
    JsonOption,
    ModelOption,
    PlotOption,
    print_json,
    stage_bar,
    stdout,
)
from foreword.errors import RequestError


def compare(
    model: ModelOption = DEFAULT_MODEL,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Engines to compare with: llama.cpp,transformers,vllm. Default: those that are installed."
        ),
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PEER=PATH",
            help="Python interpreter with that engine: llama.cpp=/opt/bin/python; repeatable.",
        ),
    ] = None,
    draft: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Draft model for the engines that support one.")
    ] = None,
    dataset: Annotated[
        Path | None, typer.Option(help="JSON lines as for `bench drafters`. Default: our own.")
    ] = None,
    category: Annotated[
        str | None, typer.Option(help="Use only prompts of this category, such as chat. Default: all.")
    ] = None,
    limit_per_category: Annotated[
        int, typer.Option(min=1, help="Use the first N prompts of each category.")
    ] = 2,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens of every answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of every prompt.")] = 3,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of every engine. Default: all cores.")
    ] = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare speed, time to first token and memory with other engines, each plain and with its own speculation.

    The same file or its equal conversion, the same token ids, greedy, one request at a time, all loaded and warm,
    taking turns. Ratios are of neighbouring answers, to the fastest plain peer, with 95% intervals.
    """
    from foreword.bench.compare import Race, contestants, plot_comparison, summarise
    from foreword.bench.prompts import own_prompts, read_prompts, take_per_category
    from foreword.bench.skeleton import Column, optional, table
    from foreword.engine.prompts import encode_prompt
    from foreword.kernels.native import choose_threads
    from foreword.models.formats.checkpoint import open_checkpoint
    from foreword.models.sources.resolve import resolve_model

    wanted = None if peers is None else [name.strip() for name in peers.split(",")]
    draft_path = None if draft is None else str(resolve_model(draft))
    chosen = contestants(wanted, _pythons(python), draft_path)
    found = own_prompts() if dataset is None else read_prompts(dataset)
    prompts = take_per_category([p for p in found if category in (None, p.category)], limit_per_category)
    if not prompts:
        raise RequestError(f"--category {category}: there are no such prompts")
    with stage_bar() as show:
        path = resolve_model(model, on_progress=show)
        tokenizer = open_checkpoint(path).tokenizer()
        ids = [encode_prompt(tokenizer, prompt.text) for prompt in prompts]
        race = Race(str(path), ids, max_tokens, rounds, threads or choose_threads())
        answers, absent = race.run(chosen, show)
    beside, rows = summarise(answers, chosen)
    title = f"{model}, {len(prompts)} prompts × {max_tokens} tokens × {rounds} rounds, {race.threads} threads"
    columns: dict[str, Column] = {
        "engine": "{.label}",
        "tokens/s": "{.tokens_per_second:.1f}",
        f"× {beside}": "{0.ratio.middle:.2f} ({0.ratio.low:.2f} to {0.ratio.high:.2f})",
        "first token": "{.first_ms:.0f} ms",
        "memory": lambda row: f"{row.peak_bytes / 2**20:.0f} MiB",
        "same text": lambda row: optional(row.same_as_plain, ".0%", ""),
    }
    stdout.print(table(rows, columns, title))
    for reason in absent:
        stdout.print(reason, markup=False, soft_wrap=True)
    if plot is not None:
        plot_comparison(rows, beside, plot, title)
        stdout.print(f"plot: {plot}", soft_wrap=True)
    if as_json:
        print_json(
            {
                "model": model,
                "prompts": len(prompts),
                "max_tokens": max_tokens,
                "rounds": rounds,
                "threads": race.threads,
                "baseline": beside,
                "rows": [row.as_json() for row in rows],
                "absent": absent,
                "made": made(),
            }
        )


def _pythons(given: list[str] | None) -> dict[str, str]:
    named = {}
    for text in given or ():
        name, equals, path = text.partition("=")
        if not equals or not Path(path).is_file():
            raise RequestError(f"--python {text}: give a peer and an interpreter, llama.cpp=/path/to/python")
        named[name] = path
    return named
