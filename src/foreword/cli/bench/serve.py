"""`foreword bench serve`: load generator for servers with OpenAI's API."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreword.cli.console import JsonOption, print_json, stage_bar, stdout
from foreword.cli.options.common import check_plot
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.bench.prompts import BenchPrompt
    from foreword.bench.serve.answer import RequestOutcome
    from foreword.bench.serve.generator import LoadRun
    from foreword.bench.serve.load import LoadSettings, Question
    from foreword.bench.serve.report import GoodputLimits

DEFAULT_REQUESTS = 100
DEFAULT_CONCURRENCY = 8


def serve(
    url: Annotated[str, typer.Option(help="Address of the server, such as http://127.0.0.1:8000.")],
    rate: Annotated[
        float | None,
        typer.Option(
            help="Open loop: Poisson arrivals at this many requests per second; inf sends all at once."
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            help=f"Closed loop: requests in flight. Default, without --rate: {DEFAULT_CONCURRENCY}."
        ),
    ] = None,
    num_requests: Annotated[
        int | None,
        typer.Option(help=f"Requests to send. Default, without --duration: {DEFAULT_REQUESTS}."),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help="Seconds during which requests are sent; those in flight finish.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    seed: Annotated[
        int, typer.Option(help="Seed of arrivals, prompt order and drops; request i is sent with seed + i.")
    ] = 0,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Name of the model. Default: the first of /v1/models.")
    ] = None,
    endpoint: Annotated[str, typer.Option(help="API route: completions or chat.")] = "completions",
    dataset: Annotated[
        Path | None,
        typer.Option(help="JSON lines as in Spec-Bench, HumanEval or GSM8K. Default: the shipped prompts."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="FOREWORD_API_KEY", help="API key, sent as bearer token.")
    ] = None,
    speculation: Annotated[
        str | None,
        typer.Option(
            help="Value of the request field `speculation` (Foreword servers): off or a JSON object."
        ),
    ] = None,
    extra_body: Annotated[
        str | None, typer.Option(help='Further fields of every request, such as {"ignore_eos": true}.')
    ] = None,
    goodput: Annotated[
        str | None, typer.Option(help="Limits of a good request in ms: ttft:500,tpot:50,e2el:5000.")
    ] = None,
    disconnect: Annotated[float, typer.Option(help="Fraction of streams to drop midway, at random.")] = 0.0,
    timeout: Annotated[float, typer.Option(help="Timeout of a request in seconds.")] = 600.0,
    plot: Annotated[
        Path | None, typer.Option(callback=check_plot, help="Draw TTFT and ITL into this PNG file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure latency, throughput and goodput of a server under load; exit code 1 if no request was completed.

    Counted from when a request was due (open loop) or sent (closed loop), completed requests alone:

    TTFT = first chunk with text - due. E2E = last chunk of the answer - due.

    TPOT = (E2E - TTFT) / (output tokens - those of the first chunk). Output tokens are those of `usage`; without it,
    chunks. A first chunk that does not say how many tokens it holds counts as one.

    ITL = time between two chunks with text. ITL per token = that / tokens of the second chunk, where it says.

    Percentiles are interpolated linearly. Goodput = requests that keep all limits, of all not dropped on purpose.
    """
    from foreword.bench.prompts import own_prompts, read_prompts
    from foreword.bench.serve.load import LoadSettings, Question, extra_fields
    from foreword.bench.serve.report import make_report, parse_limits, report_json
    from foreword.bench.serve.tables import latency_table, plot_latencies, summary_table
    from foreword.wire.openai_http import base_address

    if rate is not None and concurrency is not None:
        raise RequestError("--rate is an open loop, --concurrency a closed one: give one of them")
    if num_requests is None and duration is None:
        num_requests = DEFAULT_REQUESTS
    clients = DEFAULT_CONCURRENCY if concurrency is None else concurrency
    load = LoadSettings(rate, clients, num_requests, duration, timeout, disconnect, seed)
    extra = extra_fields(speculation, extra_body)
    question = Question(model or "", endpoint, max_tokens, temperature, seed, extra=extra)
    limits = None if goodput is None else parse_limits(goodput)
    address = base_address(url)
    prompts = own_prompts() if dataset is None else read_prompts(dataset)
    question, run = asyncio.run(_run(address, api_key, question, load, prompts))
    report = make_report(run, limits)
    title = f"{question.model} at {address}, {_loop_name(load)}, {question.endpoint}, ≤ {max_tokens} tokens"
    stdout.print(latency_table(report, title))
    stdout.print(summary_table(report, limits))
    if plot is not None:
        plot_latencies(run.outcomes, plot, title)
        stdout.print(f"plot: {plot}", soft_wrap=True)
    if as_json:
        print_json(
            {**_asked(address, question, load, limits), "prompts": len(prompts), **report_json(report)}
        )
    if not report.completed:
        raise typer.Exit(1)


async def _run(
    address: str,
    api_key: str | None,
    question: "Question",
    load: "LoadSettings",
    prompts: "Sequence[BenchPrompt]",
) -> "tuple[Question, LoadRun]":
    """The run, and the question with the model's name in it."""
    from foreword.bench.serve.generator import LoadGenerator
    from foreword.wire.openai_http import listed_model, open_client

    async with open_client(address, api_key) as client:
        model = await listed_model(client, question.model)
        question = replace(question, model=model.name, continuous_usage=model.has_continuous_usage)
        with stage_bar() as show:
            on_outcome = _progress(show, load)
            return question, await LoadGenerator(client, question, load).run(prompts, on_outcome)


def _progress(
    show: Callable[[str, int, int], None], load: "LoadSettings"
) -> "Callable[[RequestOutcome], None]":
    """Shows every request that is over: by number if that is bounded, else by time."""
    from foreword.bench.serve.answer import Ending

    start = perf_counter()
    over = {"answered": 0, "not": 0}

    def on_outcome(outcome: "RequestOutcome") -> None:
        over["answered" if outcome.ending is Ending.COMPLETED else "not"] += 1
        stage = f"{over['answered']} answered, {over['not']} not"
        if load.num_requests is not None:
            show(stage, sum(over.values()), load.num_requests)
        else:
            show(stage, int(perf_counter() - start), int(load.duration or 0))

    return on_outcome


def _loop_name(load: "LoadSettings") -> str:
    return f"closed loop of {load.concurrency}" if load.rate is None else f"open loop at {load.rate:g}/s"


def _asked(
    address: str, question: "Question", load: "LoadSettings", limits: "GoodputLimits | None"
) -> dict[str, Any]:
    """The settings of a run for JSON, which has no infinity; the key is not among them."""
    asked = {"url": address, **asdict(question), **asdict(load)}
    asked["loop"] = "closed" if load.rate is None else "open"
    asked["limits_ms"] = None if limits is None else asdict(limits)
    if load.rate is None:
        return asked
    return asked | {"rate": load.rate if math.isfinite(load.rate) else "inf", "concurrency": None}
