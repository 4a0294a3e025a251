"""The grid of `foreword bench drafters`: category, temperature, concurrent requests."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from foreword import __version__
from foreword.cli.bench.made import made
from foreword.cli.console import load_llm, parse_sizes, print_json, stage_bar, stdout
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.bench.drafters.grid import GridCell, GridRecord


@dataclass(frozen=True)
class GridOptions:
    """Options of the command line."""

    model: str
    dataset: Sequence[Path] | None
    limit_per_category: int | None
    max_tokens: int
    ignore_eos: bool
    methods: str | None
    seed: int
    concurrency: str | None
    temperatures: str | None
    cost_per_hour: float
    resume: Path | None
    page: Path | None
    dtype: str
    device: str
    backend: str
    as_json: bool


def drafter_grid(given: GridOptions) -> None:
    """Measure missing cells, then print the table and write the page and JSON."""
    from foreword.bench.drafters.grid import (
        GridBench,
        GridCell,
        GridRecord,
        GridSettings,
        cpu_speedups,
        grid_page,
        speedups,
    )
    from foreword.bench.drafters.measure import Ledger
    from foreword.bench.methods import default_methods, parse_methods
    from foreword.bench.prompts import bench_prompts, prompts_digest

    at_once = parse_sizes("--concurrency", given.concurrency or "1,4", least=1)
    if given.page is not None and not given.page.absolute().parent.is_dir():
        raise RequestError(f"--page: there is no directory {given.page.parent}")
    temperatures = _numbers(given.temperatures or "0,0.7,1")
    methods = default_methods() if given.methods is None else parse_methods(given.methods)
    prompts = bench_prompts(given.dataset, given.limit_per_category)
    kinds = list(dict.fromkeys(prompt.category for prompt in prompts))
    cells = [GridCell(kind, warm, count) for kind in kinds for warm in temperatures for count in at_once]
    llm = load_llm(given.model, given.dtype, given.device, given.backend)
    settings = GridSettings(given.max_tokens, given.seed, given.ignore_eos)
    made_with = {
        "model": given.model,
        "version": __version__,
        "decoder": type(llm.engine.target).__name__,
        "dtype": given.dtype,
        "prompts": len(prompts),
        "prompts_digest": prompts_digest(prompts),
        **asdict(settings),
    }
    ledger = None if given.resume is None else Ledger(given.resume, made_with, GridRecord.from_json)
    labels = {"plain", *(method.label for method in methods)}
    records = [r for r in (ledger.records if ledger else []) if r.cell in cells and r.drafter in labels]
    bench = GridBench(llm, methods, settings)
    with stage_bar() as show:
        for record in bench.measure(prompts, cells, records, show):
            records.append(record)
            if ledger is not None:
                ledger.add(record)
    ratios, by_cpu = speedups(records), cpu_speedups(records)
    title = f"{given.model}, {len(prompts)} prompts, answers of up to {given.max_tokens} tokens"
    stdout.print(_table(records, ratios, by_cpu, given.cost_per_hour, title))
    origin = made()
    if given.page is not None:
        given.page.write_text(grid_page(records, title, origin, given.cost_per_hour), encoding="utf-8")
        stdout.print(f"page: {given.page}", soft_wrap=True)
    if given.as_json:
        rows = [
            {
                **record.as_json(),
                "acceptance": record.acceptance,
                "per_position": record.per_position,
                "tokens_per_pass": record.tokens_per_pass,
                "speedup": ratios.get(record.key),
                "cpu_speedup": by_cpu.get(record.key),
                "cost_per_million": record.cost_per_million(given.cost_per_hour),
            }
            for record in records
        ]
        print_json({**made_with, "made": origin, "cost_per_hour": given.cost_per_hour, "rows": rows})


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(f"--temperatures takes numbers separated by commas, not {text!r}") from None
    if not all(0 <= number <= 2 for number in numbers):
        raise RequestError("--temperatures must be in 0 .. 2")
    return numbers


def _table(
    records: "list[GridRecord]",
    ratios: "dict[tuple[str, GridCell], float]",
    by_cpu: "dict[tuple[str, GridCell], float]",
    cost_per_hour: float,
    title: str,
) -> Table:
    heads = (
        "kind",
        "T",
        "at once",
        "drafter",
        "α",
        "τ",
        "tokens/s",
        "speed-up",
        "by CPU",
        "p50",
        "per million",
    )
    table = Table(*heads, title=title)
    for record in sorted(records, key=lambda r: (r.category, r.temperature, r.concurrency)):
        found = (ratios.get(record.key), by_cpu.get(record.key))
        table.add_row(
            record.category,
            f"{record.temperature:g}",
            str(record.concurrency),
            record.drafter,
            f"{record.acceptance:.0%}" if record.drafted_per_position else "",
            f"{record.tokens_per_pass:.2f}",
            f"{record.tokens_per_second:.1f}",
            *("" if ratio is None else f"{ratio:.2f}" for ratio in found),
            f"{record.latency_p50:.2f} s",
            f"{record.cost_per_million(cost_per_hour):.3g}",
        )
    return table
