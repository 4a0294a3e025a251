"""`foreword bench server-overhead`: the server's overhead per token."""

import asyncio
from dataclasses import asdict
from itertools import cycle, islice
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
    print_json,
    progress_bar,
    stage_bar,
    stdout,
)


def server_overhead(
    model: ModelOption = DEFAULT_MODEL,
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 8,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of engine and server, in turns.")] = 5,
    speculative_config: Annotated[
        str | None,
        typer.Option(help="Drafter of engine and server, as a JSON object. Default: plain decoding."),
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Compare time per token of an engine in this process and of a server over HTTP, in turns, on the same prompts.

    Greedy, on the shipped prompts. The server is started on a free port and measured by a client in this process.
    """
    from foreword.bench.prompts import own_prompts
    from foreword.bench.server_overhead import Work, measure_server_overhead, served_model
    from foreword.engine.engine import Engine
    from foreword.engine.prompts import encode_prompt
    from foreword.models.formats.checkpoint import open_checkpoint
    from foreword.models.sources.resolve import resolve_model

    with stage_bar() as on_stage:
        path = resolve_model(model, on_progress=on_stage)
    tokenizer = open_checkpoint(path).tokenizer()
    prompts = [encode_prompt(tokenizer, prompt.text) for prompt in islice(cycle(own_prompts()), streams)]
    options = ["--dtype", dtype, "--device", device, "--backend", backend, "--generation-config", "none"]
    options += (
        ["--speculation", "off"]
        if speculative_config is None
        else ["--speculative-config", speculative_config]
    )
    with served_model(str(path), options) as server, progress_bar(f"loading {model}") as on_progress:
        engine = Engine.load(
            str(path),
            dtype=dtype,
            device=device,
            backend=backend,
            speculation=speculative_config,
            progress=on_progress,
        )
        try:
            with stage_bar() as on_stage:
                work = Work(prompts, tokens)
                report = asyncio.run(measure_server_overhead(engine, server, work, repeats, on_stage))
        finally:
            engine.close()
    table = Table("", box=SIMPLE_HEAD, title=f"{streams} streams of {tokens} tokens")
    for name in ("ms per token", "CPU ms per token, engine", "API process"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, run in (("engine", report.engine), ("server", report.server)):
        table.add_row(name, f"{run.token_ms:.3f}", f"{run.engine_cpu_ms:.3f}", f"{run.api_cpu_ms:.3f}")
    stdout.print(table)
    stdout.print(f"the server takes {report.ratio:.3f} x the engine's time per token")
    if as_json:
        print_json({"model": model, **asdict(report)})
