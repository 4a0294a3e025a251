"""`foreword bench pacing`: what the timing of a stream leaks."""

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
    load_llm,
    print_json,
    stage_bar,
    stdout,
)
from foreword.cli.options.common import check_plot

if TYPE_CHECKING:
    from foreword.bench.pacing import Trace, WireChunk

Streams = dict[tuple[int, int], list["WireChunk"]]


def pacing(
    model: ModelOption = DEFAULT_MODEL,
    prompts: Annotated[int, typer.Option(min=2, help="Number of prompts to distinguish.")] = 50,
    repeats: Annotated[int, typer.Option(min=2, help="Answers to each prompt.")] = 3,
    tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 48,
    temperature: Annotated[
        float,
        typer.Option(
            min=0,
            help="Sampling temperature; 0: all answers to a prompt are the same, the observer's best case.",
        ),
    ] = 0.0,
    speculative_config: Annotated[
        str, typer.Option(help="Drafter of the speculative runs, as a JSON object.")
    ] = '{"method": "ngram", "num_speculative_tokens": 5}',
    plot: Annotated[
        Path | None,
        typer.Option(callback=check_plot, help="Draw both cadences and the result into this PNG file."),
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measure how well an observer identifies prompts by timing and size of their streams: plain, speculative, paced.

    Answers come from the real engine, one at a time; the pacing of their arrivals is computed. A nearest-neighbour
    classifier compares each stream with those of the other repeats.
    """
    from foreword.acceptance.params import SamplingParams
    from foreword.bench.pacing import classify_prompts, plot_pacing, record, short_prompts
    from foreword.bench.skeleton import table

    llm = load_llm(model, dtype, device, backend, speculative_config)
    asked = [llm.encode(text) for text in short_prompts(prompts)]
    params = SamplingParams(temperature=temperature, max_tokens=tokens)
    with stage_bar() as on_stage:
        plain, guessed = (
            record(llm.engine, asked, repeats, params, speculate, lambda *done, s=stage: on_stage(s, *done))
            for stage, speculate in (("plain", False), ("speculative", True))
        )
    streams = {
        "plain decoding": _unpaced(plain),
        "speculative, burst": _unpaced(guessed),
        "speculative, even": _paced(guessed),
    }
    rows = [row for name, watched in streams.items() for row in classify_prompts(name, watched)]
    columns = {"stream": "{.stream}", "the observer compares": "{.features}", "right": "{0.right}/{0.trials}"}
    stdout.print(table(rows, columns | {"accuracy": "{.accuracy:.0%}", "chance": "{.chance:.0%}"}))
    if plot is not None:
        shown = max(guessed, key=lambda trace: trace.unevenness)
        plot_pacing(
            {name: watched[shown.prompt, shown.repeat] for name, watched in streams.items()}, rows, plot
        )
    if as_json:
        print_json({"model": model, "rows": [asdict(row) | {"accuracy": row.accuracy} for row in rows]})


def _unpaced(traces: "list[Trace]") -> Streams:
    return {(trace.prompt, trace.repeat): trace.unpaced() for trace in traces}


def _paced(traces: "list[Trace]") -> Streams:
    from foreword.bench.pacing import WireChunk
    from foreword.server.api.pacing import PaceMemory, replay

    memory = PaceMemory()  # as on a server: streams follow each other

    return {
        (trace.prompt, trace.repeat): [
            WireChunk(block.time, block.size) for block in replay(trace.units(), memory)
        ]
        for trace in traces
    }
