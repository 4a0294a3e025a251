"""`foreword bench learn`: gain and cost of training the head on the served traffic."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from foreword.bench.skeleton import Column, optional
from foreword.cli.bench.common import MOST_TOKENS, TEMPERATURE, Benchmark, provenance
from foreword.cli.console import fetched, print_table, stage_bar, stdout
from foreword.cli.options.grouped import option, pick
from foreword.errors import ForewordError

if TYPE_CHECKING:
    from foreword.bench.learning.heads import HeadRow
    from foreword.bench.learning.shift import ShiftReport, ShiftSettings
    from foreword.bench.learning.traffic import ShiftedTraffic

METHOD = "eagle3"


@dataclass(frozen=True, kw_only=True)
class Learn(Benchmark):
    """Measure what `foreword serve --learn` gains after a shift of the traffic, and what it costs meanwhile.

    Two servers get the same requests, made from templates: general questions, then one other subject. Only one of them
    learns. While it trains, rounds of both are compared in turns: latencies at the same load, and texts. It ends when a
    version of the head is in use.

    Then both heads draft for prompts that were never sent: tokens per pass at a fixed depth, and whether texts are the
    same.
    """

    shift: str = option("sql", "Subject after the shift: sql, mail (one shop's e-mails) or german.")
    before: int = option(40, "General requests before the shift.", min=2)
    requests: int = option(2000, "Most requests after the shift.", min=1)
    minutes: float = option(60.0, "Most minutes after the shift.", min=0)
    held_out: int = option(16, "Prompts of each subject that are measured and never sent.", min=1)
    tokens: int = option(96, MOST_TOKENS, min=16)
    temperature: float = option(0.0, TEMPERATURE, min=0)
    utilization: float = option(0.5, "Load: arrival rate times the latency of a request alone.")
    rounds: int = option(5, "Compared rounds, while a training runs.")
    round_requests: int = option(20, "Requests of each round.")
    learn_min_tokens: int = option(20_000, "New answer tokens that begin a training.", min=1)
    learn_share: float = option(0.03, "Share of busy time that the training may use.", min=0, max=1)
    draft_tokens: int = option(4, "Draft tokens per pass when heads are compared.", min=1)
    speculation: str = option("auto", "Drafter to begin from: auto or a JSON object with an eagle3 head.")
    seed: int = option(0, "Seed of prompts, arrivals and answers.")

    def run(self) -> None:
        from foreword.bench.learning.shift import ShiftSettings
        from foreword.bench.learning.traffic import ShiftedTraffic

        settings = pick(ShiftSettings, self, seconds=60 * self.minutes)
        traffic = ShiftedTraffic.of(self.shift, self.before, self.requests, self.held_out, self.seed)
        path, made = fetched(self.model), provenance()
        with TemporaryDirectory(prefix="foreword-learn-") as folder:
            report = self._observe(path, Path(folder), traffic, settings)
            rows = self._measure(path, _version_path(Path(folder), report), traffic)
        self._show(report, rows, made)

    def _observe(
        self, path: Path, folder: Path, traffic: "ShiftedTraffic", settings: "ShiftSettings"
    ) -> "ShiftReport":
        """Run both servers, and send the traffic."""
        from foreword.bench.learning.shift import HttpServer, observe_shift
        from foreword.bench.server_overhead import served_model
        from foreword.engine.prompts import encode_prompt
        from foreword.models.formats.checkpoint import open_checkpoint

        tokenizer = open_checkpoint(path).tokenizer()
        options = ["--generation-config", "none", "--speculation", self.speculation]
        for name, value in self.load_options.items():
            options += [f"--{name.replace('_', '-')}", value]
        learn = ["--learn", "--learn-dir", str(folder), "--learn-min-tokens", str(self.learn_min_tokens)]
        learn += ["--learn-share", str(self.learn_share)]
        server = partial(
            HttpServer,
            encode=partial(encode_prompt, tokenizer),
            tokens=self.tokens,
            temperature=self.temperature,
        )
        with (
            served_model(str(path), options) as static,
            served_model(str(path), [*options, *learn]) as learning,
            stage_bar(is_long=True) as show,
        ):
            return observe_shift(server(static), server(learning), traffic, settings, show)

    def _measure(self, path: Path, version: Path, traffic: "ShiftedTraffic") -> "list[HeadRow]":
        """Compare the initial head with the trained version."""
        from foreword.acceptance.params import SamplingParams
        from foreword.bench.learning.heads import measure_heads
        from foreword.drafters.config import SpeculationConfig

        llm = self.load()
        try:
            drafter = {"method": METHOD, "num_speculative_tokens": self.draft_tokens}
            static = llm.loaded.choose_speculation(self.speculation).config
            learned = SpeculationConfig.parse({**drafter, "model": str(version)})
            model = None if static is None or METHOD not in static.method else dict(static.options)["model"]
            first = None if model is None else SpeculationConfig.parse({**drafter, "model": model})
            llm.offer([head for head in (first, learned) if head is not None])
            params = SamplingParams(temperature=self.temperature, max_tokens=self.tokens, seed=self.seed)
            with stage_bar() as show:
                return measure_heads(llm.engine, llm.encode, traffic.held_out, first, learned, params, show)
        finally:
            llm.close()

    def _show(self, report: "ShiftReport", rows: "list[HeadRow]", made: dict[str, str]) -> None:
        """Print the tables and the result of the roll-out."""
        latencies = (("without a training", report.static), ("beside a training", report.learning))
        columns: dict[str, Column] = {
            "latency": "{0[0]}",
            "requests": "{0[1].n}",
            "p50 ms": lambda row: optional(row[1].p50_ms, ".0f"),
            "p95 ms": lambda row: optional(row[1].p95_ms, ".0f"),
        }
        print_table(latencies, columns, f"{report.rounds} rounds at {report.rate:.2f} requests/s")
        on = optional(report.on_seconds, ".0f", "never")
        stdout.print(
            f"p95 beside a training / without: {optional(report.p95_ratio, '.2f')}; same texts: {report.same_texts} of "
            f"{report.compared_texts}; seconds after the shift until a version was trained: "
            f"{optional(report.trained_seconds, '.0f', 'never')}, in use for all requests: {on}; {report.stage}",
            highlight=False,
        )
        self.report(rows, f"after a shift to {self.shift}", made=made, shift=asdict(report))


def _version_path(folder: Path, report: "ShiftReport") -> Path:
    """Return the directory of the version in use, otherwise of the newest trained one."""
    versions = folder / "versions"
    trained = [int(path.name) for path in versions.glob("[0-9]*") if (path / "config.json").exists()]
    if not trained:
        raise ForewordError(
            f"no version of the head was kept: {report.reason or f'the learner was {report.state}'}; "
            "give more --requests and --minutes, or fewer --learn-min-tokens"
        )
    return versions / str(max(trained) if report.version is None else report.version)
