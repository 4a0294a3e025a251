"""`foreword bench drafters` and `foreword bench control`: speed-up, and goals of the controller."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from rich.text import Text

from foreword import __version__
from foreword.bench.ledger import Ledger
from foreword.bench.prompts import (
    BenchPrompt,
    bench_prompts,
    document_prompts,
    long_documents,
    prompts_digest,
    take_per_category,
)
from foreword.bench.skeleton import PLAIN, Column, optional
from foreword.cli.bench.common import (
    BATCH_SIZES,
    DATASET,
    MOST_TOKENS,
    TEMPERATURE,
    Benchmark,
    prompts_of,
    provenance,
)
from foreword.cli.console import fields_of, print_table, say, stage_bar, stdout
from foreword.cli.options.common import check_output, parse_sizes, plot_option, save_plot, split_list
from foreword.cli.options.grouped import flag, given, option, pick
from foreword.errors import RequestError
from foreword.progress import StageProgress

if TYPE_CHECKING:
    from foreword.engine.llm import LLM

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Drafters(Benchmark):
    """Measure acceptance, tokens per pass and speed-up of each drafter, by category.

    Every prompt is decoded plainly and with every drafter, in turn; the texts are the same.

    With --concurrency, --temperatures or --page: a grid of category, temperature and concurrent requests, with
    acceptance by position, latency, time split and the cost of a million tokens.
    """

    dataset: list[Path] | None = option(None, "Prompts as JSON lines; repeatable. Default: the shipped ones.")
    context: str | None = option(
        None,
        "Prompt lengths in tokens, such as 1024,8192: the prompts are the project's docs and source, cut.",
    )
    limit_per_category: int | None = option(None, "Use the first N prompts of each category. Default: all.")
    max_tokens: int = option(64, MOST_TOKENS)
    ignore_eos: bool = flag("Continue to --max-tokens after an end token.")
    methods: str | None = option(
        None,
        "Drafters: names or JSON objects separated by commas; a+b combines; default is that of --speculation "
        "auto. Default: all that need no settings.",
    )
    repeats: int = option(1, "Runs of each drafter and prompt; the median is reported.")
    temperature: float = option(0.0, TEMPERATURE)
    seed: int = option(0, "Seed of every answer.")
    history: bool = flag("Let drafters learn from earlier answers of the run.")
    resume: Path | None = option(None, "Store measurements in this file and skip those that it has.")
    plot: Path | None = plot_option("Draw τ and speed-up into this PNG file.")
    concurrency: str | None = option(None, "Concurrent requests of the grid, such as 1,4,16.", last=1)
    temperatures: str | None = option(None, "Temperatures of the grid, such as 0,0.7,1.", last=1)
    cost_per_hour: float = option(1.0, "Price of this machine per hour, for the token cost.", min=0.0, last=1)
    page: Path | None = option(None, "Write the grid into this self-contained HTML file.", last=1)

    def run(self) -> None:
        if of_grid := given(self, "concurrency", "temperatures", "page"):
            if alone := given(self, "repeats", "temperature", "history", "plot"):
                raise RequestError(
                    f"{alone[0]} cannot be combined with the grid of {of_grid[0]}; leave one out"
                )
            self._grid()
            return
        if given(self, "cost_per_hour"):
            raise RequestError(
                "--cost-per-hour is for a grid: give --concurrency, --temperatures or --page too"
            )
        from foreword.bench.drafters.decode import Record
        from foreword.bench.drafters.measure import BenchSettings, DrafterBench
        from foreword.bench.drafters.summary import drafter_table, plot_rows, slowest_prompts, summarise
        from foreword.bench.methods import DEFAULT, default_methods, is_random, parse_methods

        settings = pick(BenchSettings, self)
        settings.sampling()  # refuse invalid parameters before loading
        if self.history and self.resume is not None:
            raise RequestError("--history and --resume exclude each other: the file has no drafter states")
        wanted = None if self.methods is None else parse_methods(self.methods)
        llm, prompts = self._load_with_prompts()
        made_with = {"model": self.model, "dtype": self.dtype, "device": self.device, **asdict(settings)}
        ran_on = {"version": __version__, "decoder": type(llm.engine.target).__name__}
        if wanted is None:
            drafts = llm.loaded.choose_speculation("auto").config is not None
            wanted = [DEFAULT, *default_methods()] if drafts else default_methods()
        bench = DrafterBench(llm, wanted, settings)
        order = {method.label: index for index, method in enumerate(wanted)}
        keys = {prompt.key for prompt in prompts}
        records = self._measured(
            ran_on | made_with,
            Record,
            lambda one: one.prompt in keys and one.drafter in order,
            partial(bench.measure, prompts),
        )
        records.sort(key=lambda record: order[record.drafter])
        rows = summarise(records)
        title = f"{self.model}, {len(prompts)} prompts × up to {self.max_tokens} tokens, plain decoding = 1"
        stdout.print(drafter_table(rows, title))
        slowest = slowest_prompts([record for record in records if not is_random(record.drafter)])
        say(*(one.line for one in slowest))
        save_plot(self.plot, lambda path: plot_rows(rows, path, title))
        slowest_json = [one.as_json() for one in slowest]
        self.show_json({**made_with, "rows": fields_of(rows), "slowest": slowest_json})

    def _load_with_prompts(self) -> "tuple[LLM, list[BenchPrompt]]":
        """Return the model and the prompts; files are read first, --context needs the model's tokenizer."""
        if self.context is None:
            prompts = bench_prompts(self.dataset, self.limit_per_category)
            return self.load(), prompts
        if self.dataset:
            raise RequestError("--context and --dataset exclude each other: --context has prompts of its own")
        lengths = parse_sizes("--context", self.context, least=1)
        llm = self.load()
        longest = llm.engine.max_model_len - self.max_tokens
        if max(lengths) > longest:
            raise RequestError(
                f"--context {max(lengths)} is too long: this model's context of {llm.engine.max_model_len} tokens "
                f"has room for {longest} before answers of {self.max_tokens}"
            )
        prompts = document_prompts(lengths, long_documents(), llm.encode)
        return llm, take_per_category(prompts, self.limit_per_category)

    def _measured(
        self,
        settings: Mapping[str, Any],
        kind: type[R],
        is_wanted: Callable[[R], bool],
        measure: Callable[[list[R], StageProgress], Iterator[R]],
    ) -> list[R]:
        """Return the wanted records of the --resume file, and those that `measure` adds to it."""
        ledger = None if self.resume is None else Ledger(self.resume, settings, kind)
        records = [] if ledger is None else [record for record in ledger.records if is_wanted(record)]
        with stage_bar() as show:
            for record in measure(records, show):
                records.append(record)
                if ledger is not None:
                    ledger.add(record)
        return records

    def _grid(self) -> None:
        """Measure the cells that the --resume file does not have, print the table, and write the page and JSON."""
        from foreword.bench.drafters import grid
        from foreword.bench.methods import default_methods, parse_methods

        at_once = parse_sizes("--concurrency", self.concurrency or "1,4", least=1)
        if self.page is not None:
            check_output("--page", self.page)
        temperatures = _numbers(self.temperatures or "0,0.7,1")
        methods = default_methods() if self.methods is None else parse_methods(self.methods)
        llm, prompts = self._load_with_prompts()
        kinds = list(dict.fromkeys(prompt.category for prompt in prompts))
        points = product(kinds, temperatures, at_once)
        cells = [grid.GridCell(*point) for point in points]
        settings = pick(grid.GridSettings, self)
        made_with = {
            "model": self.model,
            "version": __version__,
            "decoder": type(llm.engine.target).__name__,
            "dtype": self.dtype,
            "prompts": len(prompts),
            "prompts_digest": prompts_digest(prompts),
            **asdict(settings),
        }
        labels = {PLAIN, *(method.label for method in methods)}
        records = self._measured(
            made_with,
            grid.GridRecord,
            lambda one: one.cell in cells and one.drafter in labels,
            partial(grid.GridBench(llm, methods, settings).measure, prompts, cells),
        )
        ratios, by_cpu = grid.speedups(records), grid.cpu_speedups(records)
        title = f"{self.model}, {len(prompts)} prompts, answers of up to {self.max_tokens} tokens"
        columns: dict[str, Column] = {
            "kind": "{.category}",
            "T": "{.temperature:g}",
            "at once": "{.concurrency}",
            "drafter": "{.drafter}",
            "α": lambda one: f"{one.acceptance:.0%}" if one.drafted_per_position else "",
            "τ": "{.tokens_per_pass:.2f}",
            "tokens/s": "{.tokens_per_second:.1f}",
            "speed-up": lambda one: optional(ratios.get(one.key), ".2f", ""),
            "by CPU": lambda one: optional(by_cpu.get(one.key), ".2f", ""),
            "p50": "{.latency_p50:.2f} s",
            "per million": lambda one: f"{one.cost_per_million(self.cost_per_hour):.3g}",
        }
        ordered = sorted(records, key=lambda one: (one.category, one.temperature, one.concurrency))
        print_table(ordered, columns, title)
        made = provenance()
        if self.page is not None:
            page = grid.grid_page(records, title, made, self.cost_per_hour)
            self.page.write_text(page, encoding="utf-8")
            say(f"page: {self.page}")
        rows = [
            {
                **asdict(one),
                "acceptance": one.acceptance,
                "per_position": one.per_position,
                "tokens_per_pass": one.tokens_per_pass,
                "speedup": ratios.get(one.key),
                "cpu_speedup": by_cpu.get(one.key),
                "cost_per_million": one.cost_per_million(self.cost_per_hour),
            }
            for one in records
        ]
        self.show_json({**made_with, "made": made, "cost_per_hour": self.cost_per_hour, "rows": rows})


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"--temperatures takes numbers separated by commas, not {text!r}") from None
    if not all(0 <= number <= 2 for number in numbers):
        raise RequestError("--temperatures must be in 0 .. 2")
    return numbers


@dataclass(frozen=True, kw_only=True)
class Control(Benchmark):
    """Compare the controller with plain decoding and fixed settings, by category and batch size.

    All take turns in short windows; ratios are of neighbouring windows. Then the traffic changes, a drafter becomes
    slow, another process takes a core, the batch grows. Exit code 1 if a goal is missed.
    """

    dataset: Path | None = option(None, DATASET)
    kinds: str = option("", "Prompt categories: chat,code; mixed is all of them at once. Default: all.")
    batches: str = option("", BATCH_SIZES)
    fixed: str = option(
        "",
        "Fixed settings to compare with: names or JSON objects separated by commas. "
        "Default: the default drafter at several depths, and ngram.",
    )
    windows: int | None = option(None, "Measured windows per category, batch and setting.")
    changes: bool = option(True, "Also measure reactions to changes of load and traffic.")
    quick: bool = flag("Measure less: takes up to 15 minutes.")
    plot: Path | None = plot_option()

    def run(self) -> None:
        from foreword.bench.control import bench
        from foreword.bench.methods import parse_methods
        from foreword.bench.pictures import save_charts

        sizes = bench.ControlSizes.of(
            self.quick,
            split_list(self.kinds),
            parse_sizes("--batches", self.batches, least=1) if self.batches else None,
            self.windows,
            self.changes,
        )
        prompts = prompts_of(self.dataset)
        sizes.check({prompt.category for prompt in prompts})
        wanted = parse_methods(self.fixed) if self.fixed else None
        llm = self.load()
        settings = bench.default_fixed(llm.loaded) if wanted is None else wanted
        with stage_bar() as show:
            report = bench.measure_control(llm.loaded, prompts, settings, sizes, show)
        title = f"{self.model}: controller against fixed settings"
        stdout.print(bench.cell_table(report.cells, title))
        if report.reactions:
            print_table(report.reactions)
        if report.mixed is not None:
            say(report.mixed.line)
        save_plot(self.plot, lambda path: save_charts([bench.ratio_chart(report.cells)], path, title))
        for failure in report.failures:
            stdout.print(Text.assemble(("does not hold", "red"), f": {failure}"), soft_wrap=True)
        print_table(report.verdicts)
        self.show_json({"model": self.model, **report.as_json()})
        if report.failures:
            raise typer.Exit(1)
