"""`foreword bench serve`: load generator for servers with OpenAI's API."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer

from foreword.bench.prompts import BenchPrompt
from foreword.bench.serve.load import LoadSettings, RequestTemplate, extra_fields
from foreword.cli.bench.common import DATASET, MOST_TOKENS, TEMPERATURE, prompts_of
from foreword.cli.console import stage_bar, stdout
from foreword.cli.options.common import JsonCommand, plot_option, save_plot
from foreword.cli.options.grouped import REQUIRED, option, pick
from foreword.errors import RequestError
from foreword.progress import StageProgress

if TYPE_CHECKING:
    from foreword.bench.serve.generator import LoadRun, RequestOutcome
    from foreword.bench.serve.report import GoodputLimits

DEFAULT_REQUESTS = 100
DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True, kw_only=True)
class Serve(JsonCommand):
    """Measure latency, throughput and goodput of a server under load; exit code 1 if no request was completed.

    Counted from when a request was due (open loop) or sent (closed loop), completed requests alone:

    TTFT = first chunk with text - due. E2E = last chunk of the answer - due.

    TPOT = (E2E - TTFT) / (output tokens - those of the first chunk). Output tokens are those of `usage`; without it,
    chunks. A first chunk that does not say how many tokens it holds counts as one.

    ITL = time between two chunks with text. ITL per token = that / tokens of the second chunk, where it says.

    Percentiles are interpolated linearly. Goodput = requests that keep all limits, of all not disconnected on purpose.
    """

    url: str = option(REQUIRED, "Address of the server, such as http://127.0.0.1:8000.")
    rate: float | None = option(None, "Open loop: Poisson arrivals per second; inf sends all at once.")
    concurrency: int | None = option(None, f"Closed loop: open requests. Default: {DEFAULT_CONCURRENCY}.")
    num_requests: int | None = option(None, f"Requests to send. Default: {DEFAULT_REQUESTS}.")
    duration: float | None = option(None, "Seconds during which requests are sent; those in flight finish.")
    max_tokens: int = option(64, MOST_TOKENS)
    temperature: float = option(0.0, TEMPERATURE)
    seed: int = option(
        0, "Seed of arrivals, prompt order and disconnections; request i is sent with seed + i."
    )
    model: str | None = option(None, "Name of the model. Default: the first of /v1/models.", "--model", "-m")
    endpoint: str = option("completions", "API route: completions or chat.")
    dataset: Path | None = option(None, DATASET)
    api_key: str | None = option(None, "API key, sent as bearer token.", envvar="FOREWORD_API_KEY")
    speculation: str | None = option(
        None, "Request field `speculation` (Foreword): off, true, false or a JSON object."
    )
    extra_body: str | None = option(None, 'Further fields of every request, such as {"ignore_eos": true}.')
    goodput: str | None = option(None, "Limits of a good request in ms: ttft:500,tpot:50,e2el:5000.")
    disconnect: float = option(0.0, "Fraction of streams to disconnect midway, at random.")
    timeout: float = option(600.0, "Timeout of a request in seconds.")
    plot: Path | None = plot_option("Draw TTFT and ITL into this PNG file.")

    def run(self) -> None:
        from foreword.bench.serve.report import make_report, parse_limits
        from foreword.bench.serve.tables import latency_table, plot_latencies, summary_table
        from foreword.wire.openai_http import base_address

        extra = extra_fields(self.speculation, self.extra_body)
        load, template = self._load(), pick(RequestTemplate, self, model=self.model or "", extra=extra)
        limits = None if self.goodput is None else parse_limits(self.goodput)
        address = base_address(self.url)
        prompts = prompts_of(self.dataset)
        template, run = asyncio.run(self._run(address, template, load, prompts))
        report = make_report(run, limits)
        loop = f"closed loop of {load.concurrency}" if load.rate is None else f"open loop at {load.rate:g}/s"
        title = f"{template.model} at {address}, {loop}, {template.endpoint}, ≤ {self.max_tokens} tokens"
        stdout.print(latency_table(report, title))
        stdout.print(summary_table(report, limits))
        save_plot(self.plot, lambda path: plot_latencies(run.outcomes, path, title))
        settings = _settings_json(address, template, load, limits)
        self.show_json({**settings, "prompts": len(prompts), **asdict(report)})
        if not report.completed:
            raise typer.Exit(1)

    def _load(self) -> LoadSettings:
        if self.rate is not None and self.concurrency is not None:
            raise RequestError("--rate is an open loop, --concurrency a closed one: give one of them")
        clients = DEFAULT_CONCURRENCY if self.concurrency is None else self.concurrency
        requests = self.num_requests
        if requests is None and self.duration is None:
            requests = DEFAULT_REQUESTS
        return pick(LoadSettings, self, concurrency=clients, num_requests=requests)

    async def _run(
        self, address: str, template: RequestTemplate, load: LoadSettings, prompts: Sequence[BenchPrompt]
    ) -> "tuple[RequestTemplate, LoadRun]":
        """Run the load; return the template with the model's name, and the run."""
        from foreword.bench.serve.generator import LoadGenerator
        from foreword.wire.openai_http import listed_model, open_client

        async with open_client(address, self.api_key) as client:
            model = await listed_model(client, template.model)
            template = replace(template, model=model.name, continuous_usage=model.has_continuous_usage)
            with stage_bar() as show:
                on_outcome = _progress(show, load)
                return template, await LoadGenerator(client, template, load).run(prompts, on_outcome)


def _progress(show: StageProgress, load: LoadSettings) -> "Callable[[RequestOutcome], None]":
    """Return a callback that shows progress by number of requests, or by time if unbounded."""
    from foreword.bench.serve.generator import Ending

    start = perf_counter()
    answered = others = 0

    def on_outcome(outcome: "RequestOutcome") -> None:
        nonlocal answered, others
        if outcome.ending is Ending.COMPLETED:
            answered += 1
        else:
            others += 1
        stage = f"{answered} answered, {others} not"
        if load.num_requests is not None:
            show(stage, answered + others, load.num_requests)
        else:
            show(stage, int(perf_counter() - start), int(load.duration or 0))

    return on_outcome


def _settings_json(
    address: str, template: RequestTemplate, load: LoadSettings, limits: "GoodputLimits | None"
) -> dict[str, Any]:
    """Return the settings of a run as JSON, without infinity and without the key."""
    settings = {"url": address, **asdict(template), **asdict(load)}
    settings["loop"] = "closed" if load.rate is None else "open"
    settings["limits_ms"] = None if limits is None else asdict(limits)
    if load.rate is None:
        return settings
    return settings | {"rate": load.rate if math.isfinite(load.rate) else "inf", "concurrency": None}
