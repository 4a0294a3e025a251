"""`foreword bench overhead`, `server-overhead`, `pacing`: time that engine and server add to passes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

from foreword.bench.prompts import own_prompts
from foreword.bench.skeleton import Column
from foreword.cli.bench.common import MOST_TOKENS, SPECULATIVE_DRAFTER, Benchmark
from foreword.cli.console import fetched, fields_of, print_table, progress_bar, stage_bar, stdout
from foreword.cli.options.common import parse_sizes, plot_option
from foreword.cli.options.grouped import option

if TYPE_CHECKING:
    from foreword.bench.pacing import Trace, WireChunk


@dataclass(frozen=True, kw_only=True)
class Overhead(Benchmark):
    """Measure the time of a draft, the guard included, relative to target passes at the same context.

    Then the CPU time of an engine step, drafting included, on passes that take no time: versions can be compared on
    a busy machine. Last, for steps with drafts as on a GPU, the part of it that a device waits for.
    """

    methods: str = option("ngram,suffix", "Drafters: names or JSON objects with commas; a+b combines.")
    contexts: str = option("100,1000,4000,7500", "Context lengths in tokens, separated by commas.")
    repeats: int = option(15, "Timed drafts at each length; the median is reported.")
    batches: str = option("1,8,32,128", "Batch sizes for the host time, separated by commas.")

    def run(self) -> None:
        lengths, sizes = parse_sizes("--contexts", self.contexts), parse_sizes("--batches", self.batches)
        from foreword.bench.host_time import MODES, measure_host_time
        from foreword.bench.methods import parse_methods
        from foreword.bench.overhead import VERIFY_ROWS, measure_overhead
        from foreword.bench.verdict_time import measure_verdicts

        wanted = parse_methods(self.methods)
        llm = self.load()
        with stage_bar() as show:
            costs = measure_overhead(llm, wanted, lengths, self.repeats, show)
            host = measure_host_time(llm, sizes, self.repeats, show)
            verdicts = measure_verdicts(llm.engine.target, sizes, self.repeats, show)
        cost_columns: dict[str, Column] = {
            "drafter": "{.drafter}",
            "context": "{.context}",
            "draft ms": "{.draft_ms:.3f}",
            "first ms": "{.first_ms:.1f}",
        }
        for count in VERIFY_ROWS:
            share, verify_ms = f"{{0.shares[{count}]:.2%}}", f"{{0.verify_ms[{count}]:.1f}} ms"
            cost_columns[f"of a pass over {count}"] = f"{share} of {verify_ms}"
        print_table(costs, cost_columns)
        # Rows of the second table: a decoding mode, and its times by batch size.
        by_mode = [(mode, {time.batch: time for time in host if time.way == mode}) for mode in MODES]
        per_step: dict[str, Column] = {"host ms per step (us per request)": "{0[0]}"}
        for batch in sizes:
            per_step[f"batch {batch}"] = f"{{0[1][{batch}].step_ms:.2f}} ({{0[1][{batch}].request_us:.0f}})"
        print_table(by_mode, per_step)
        columns = {
            "host ms per step, drafter": "{.guesses}",
            "batch": "{.batch}",
            "tokens": "{.tokens:.1f}",
            "verdict": "{.verdict_ms:.2f}",
            "next pass": "{.launch_ms:.2f}",
            "together": "{.waited_ms:.2f}",
            "beside it": "{.beside_ms:.2f}",
        }
        print_table(verdicts, columns)
        steps = {"host": fields_of(host), "verdicts": fields_of(verdicts)}
        self.show_json({"model": self.model, "rows": fields_of(costs), **steps})


@dataclass(frozen=True, kw_only=True)
class ServerOverhead(Benchmark):
    """Compare time per token of an engine in this process and of a server over HTTP, in turns, on the same prompts.

    Greedy, on the shipped prompts. The server is started on a free port and measured by a client in this process.
    """

    streams: int = option(8, "Concurrent streams.", min=1)
    tokens: int = option(128, "Tokens of each answer.", min=2)
    repeats: int = option(5, "Runs of engine and server, in turns.", min=1)
    speculative_config: str | None = option(None, "Drafter, as a JSON object. Default: plain decoding.")

    def run(self) -> None:
        from foreword.bench.server_overhead import Work, measure_server_overhead, served_model
        from foreword.engine.engine import Engine
        from foreword.engine.prompts import encode_prompt
        from foreword.models.formats.checkpoint import open_checkpoint

        path = fetched(self.model)
        tokenizer = open_checkpoint(path).tokenizer()
        texts = (prompt.text for prompt in islice(cycle(own_prompts()), self.streams))
        work = Work([encode_prompt(tokenizer, text) for text in texts], self.tokens)
        config = self.speculative_config
        drafter = ["--speculation", "off"] if config is None else ["--speculative-config", config]
        options = ["--generation-config", "none", *drafter]
        for name, value in self.load_options.items():
            options += [f"--{name.replace('_', '-')}", value]
        with served_model(str(path), options) as server, progress_bar(f"loading {self.model}") as on_progress:
            engine = Engine.load(str(path), **self.load_options, speculation=config, progress=on_progress)
            try:
                with progress_bar("measuring") as show:
                    report = measure_server_overhead(engine, server, work, self.repeats, show)
            finally:
                engine.close()
        columns = {
            "": "{0[0]}",
            "ms per token": "{0[1].token_ms:.3f}",
            "CPU ms per token, engine": "{0[1].engine_cpu_ms:.3f}",
            "API process": "{0[1].api_cpu_ms:.3f}",
        }
        runs = (("engine", report.engine), ("server", report.server))
        print_table(runs, columns, f"{self.streams} streams of {self.tokens} tokens")
        stdout.print(f"the server takes {report.ratio:.3f} x the engine's time per token")
        self.show_json({"model": self.model, **asdict(report)})


@dataclass(frozen=True, kw_only=True)
class Pacing(Benchmark):
    """Measure how well an observer identifies prompts by timing and size of their streams: plain, speculative, paced.

    Answers come from the real engine, one at a time; the pacing of their arrivals is computed. A nearest-neighbour
    classifier compares each stream with those of the other repeats.
    """

    prompts: int = option(50, "Number of prompts to distinguish.", min=2)
    repeats: int = option(3, "Answers to each prompt.", min=2)
    tokens: int = option(48, MOST_TOKENS, min=2)
    temperature: float = option(0.0, "Sampling temperature; 0 is the observer's best case.", min=0)
    speculative_config: str = option('{"method": "ngram", "num_speculative_tokens": 5}', SPECULATIVE_DRAFTER)
    plot: Path | None = plot_option("Draw both cadences and the result into this PNG file.")

    def run(self) -> None:
        from foreword.acceptance.params import SamplingParams
        from foreword.bench.pacing import classify_prompts, plot_pacing, record, short_prompts

        llm = self.load(self.speculative_config)
        encoded = [llm.encode(text) for text in short_prompts(self.prompts)]
        params = SamplingParams(temperature=self.temperature, max_tokens=self.tokens)
        with stage_bar() as show:
            plain, drafted = (
                record(llm.engine, encoded, self.repeats, params, speculate, partial(show, stage))
                for stage, speculate in (("plain", False), ("speculative", True))
            )
        streams = {
            "plain decoding": {trace.key: trace.unpaced() for trace in plain},
            "speculative, burst": {trace.key: trace.unpaced() for trace in drafted},
            "speculative, even": _paced(drafted),
        }
        rows = [row for name, chunks in streams.items() for row in classify_prompts(name, chunks)]
        columns = {
            "stream": "{.stream}",
            "the observer compares": "{.features}",
            "right": "{0.right}/{0.trials}",
            "accuracy": "{.accuracy:.0%}",
            "chance": "{.chance:.0%}",
        }
        print_table(rows, columns)
        if self.plot is not None:
            example = max(drafted, key=lambda trace: trace.unevenness).key
            plot_pacing({name: chunks[example] for name, chunks in streams.items()}, rows, self.plot)
        rows_json = [asdict(row) | {"accuracy": row.accuracy} for row in rows]
        self.show_json({"model": self.model, "rows": rows_json})


def _paced(traces: "Sequence[Trace]") -> "dict[tuple[int, int], list[WireChunk]]":
    """Return the chunks of each trace as `--stream-pacing even` would send them, by the trace's key."""
    from foreword.bench.pacing import WireChunk
    from foreword.server.api.pacing import PaceMemory, replay

    memory = PaceMemory()  # streams follow each other, as on a server
    return {
        trace.key: [WireChunk(block.time, block.size) for block in replay(trace.units(), memory)]
        for trace in traces
    }
