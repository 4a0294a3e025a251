"""Compares drafters by category, temperature and concurrency."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, groupby, islice
from operator import attrgetter
from statistics import median
from time import perf_counter, process_time

from foreword.acceptance.params import SamplingParams
from foreword.bench.drafters.decode import DecodeFigures, summed
from foreword.bench.methods import MethodBench
from foreword.bench.pictures import chart, colours_of, html_page, section
from foreword.bench.prompts import BenchPrompt
from foreword.bench.skeleton import PLAIN, Column, cells_of, optional, ratio, staged
from foreword.engine.messages import NewRequest
from foreword.engine.requests.request import Request
from foreword.progress import StageProgress

ROUNDS = 2  # requests of a cell for each concurrent one, so that the batch stays full for a while


@dataclass(frozen=True)
class GridCell:
    """One point of the grid."""

    category: str
    temperature: float
    concurrency: int

    def __str__(self) -> str:
        return f"{self.category}, temperature {self.temperature:g}, {self.concurrency} at once"


@dataclass(frozen=True, kw_only=True)
class GridRecord(DecodeFigures):
    """One drafter in one cell, with prefill.

    A pass counts once for each request that it committed tokens for.
    """

    drafter: str
    category: str
    temperature: float
    concurrency: int
    requests: int
    latency_p50: float  # from start to end of a request
    latency_max: float

    @property
    def cell(self) -> GridCell:
        return GridCell(self.category, self.temperature, self.concurrency)

    @property
    def key(self) -> tuple[str, GridCell]:
        return self.drafter, self.cell

    @property
    def acceptance(self) -> float:
        return ratio(sum(self.accepted_per_position), sum(self.drafted_per_position))

    def cost_per_million(self, cost_per_hour: float) -> float:
        """Return the cost of a million tokens on a machine with this price per hour."""
        return cost_per_hour / 3600 * self.seconds / self.tokens * 1e6


@dataclass(frozen=True)
class GridSettings:
    """Settings of all cells."""

    max_tokens: int = 64
    seed: int = 0
    ignore_eos: bool = False  # continue to `max_tokens` after an end token


class GridBench(MethodBench[GridSettings]):
    """Compares methods on the cells of a grid."""

    def measure(
        self,
        prompts: Sequence[BenchPrompt],
        cells: Sequence[GridCell],
        known: Sequence[GridRecord],
        progress: StageProgress,
    ) -> Iterator[GridRecord]:
        """Yield the record of every drafter, and of plain decoding, in every cell, except for `known` records."""
        known_keys = {record.key for record in known}
        points = [(label, cell) for cell in cells for label in self._speculation]
        wanted = [point for point in points if point not in known_keys]
        for number, (label, cell) in enumerate(staged(wanted, progress, lambda one: f"{one[0]}, {one[1]}")):
            ids = [self._llm.encode(prompt.text) for prompt in prompts if prompt.category == cell.category]
            if number == 0:  # warm-up
                self._run(label, GridCell(cell.category, 0.0, 1), ids[:1])
            yield self._run(label, cell, ids)

    def _run(self, label: str, cell: GridCell, prompts: Sequence[Sequence[int]]) -> GridRecord:
        """Answer all prompts with one drafter, always `cell.concurrency` at once; with few prompts, repeat them."""
        engine = self._llm.engine
        count = max(cell.concurrency * ROUNDS, len(prompts))
        waiting = deque(enumerate(islice(cycle(prompts), count)))
        live: dict[str, tuple[Request, float]] = {}  # running requests and their start times
        done: list[Request] = []
        latencies: list[float] = []
        before, began, worked = engine.seconds, perf_counter(), process_time()
        while waiting or live:
            while waiting and len(live) < cell.concurrency:
                request = self._add(label, cell, *waiting.popleft())
                live[request.name] = request, perf_counter()
            engine.step()
            for name, (request, since) in list(live.items()):
                if request.finish_reason is not None:
                    latencies.append(perf_counter() - since)
                    done.append(request)
                    del live[name]
        seconds, spent = perf_counter() - began, engine.seconds - before
        cpu_seconds = process_time() - worked if engine.target.device.type == "cpu" else 0.0
        return GridRecord(
            drafter=label,
            **asdict(cell),
            requests=count,
            tokens=sum(len(request.output_ids) for request in done),
            # Of the passes over a prompt (`first_passes`), only the last commits a token.
            passes=sum(one.accounting.passes - one.accounting.first_passes + 1 for one in done),
            seconds=seconds,
            draft_seconds=spent.draft,
            verify_seconds=spent.verify,
            accept_seconds=spent.accept,
            latency_p50=median(latencies),
            latency_max=max(latencies),
            drafted_per_position=summed([request.acceptance.drafted_per_position for request in done]),
            accepted_per_position=summed([request.acceptance.accepted_per_position for request in done]),
            cpu_seconds=cpu_seconds,
        )

    def _add(self, label: str, cell: GridCell, number: int, prompt: Sequence[int]) -> Request:
        settings = asdict(self._settings) | {"seed": self._settings.seed + number}
        params = SamplingParams(temperature=cell.temperature, **settings)
        # A new tenant has an empty prefix cache and unseen answers.
        name = f"{self._name}: {label}, {cell}, {number}"
        new = NewRequest(name, tuple(prompt), params, name, self._speculation[label])
        (request,) = self._llm.engine.add(new)
        return request


def grid_page(
    records: Sequence[GridRecord], title: str, made: Mapping[str, str], cost_per_hour: float
) -> str:
    """Return an HTML page with one section per category and temperature; `made` tells how it was measured."""
    colours = colours_of(list(dict.fromkeys(record.drafter for record in records)))
    about = ", ".join(f"{name} {value}" for name, value in made.items())
    by_case = attrgetter("category", "temperature")
    sections = [
        _page_section(*case, list(of_case), colours, cost_per_hour)
        for case, of_case in groupby(sorted(records, key=by_case), key=by_case)
    ]
    return html_page(title, [f"{about}; a machine hour counts {cost_per_hour:g}"], colours, sections)


def speedups(records: Sequence[GridRecord]) -> dict[tuple[str, GridCell], float]:
    """Return tokens per second relative to plain decoding in the same cell, by drafter and cell."""
    plain = {record.cell: record.tokens_per_second for record in records if record.drafter == PLAIN}
    return {r.key: r.tokens_per_second / plain[r.cell] for r in records if r.cell in plain}


def cpu_speedups(records: Sequence[GridRecord]) -> dict[tuple[str, GridCell], float]:
    """Return the same as `speedups` by CPU time instead of wall-clock time; empty if another device did the work."""
    timed = [record for record in records if record.cpu_seconds]
    return speedups([replace(record, seconds=record.cpu_seconds) for record in timed])


def _page_section(
    category: str,
    temperature: float,
    records: list[GridRecord],
    colours: Mapping[str, str],
    cost_per_hour: float,
) -> str:
    """Return the section (HTML) of one category and temperature, with three charts and a table."""
    ratios, by_cpu = speedups(records), cpu_speedups(records)
    fewest = min(record.concurrency for record in records)
    # Points by drafter.
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in colours}
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in colours}
    positions: dict[str, list[tuple[float, float]]] = {name: [] for name in colours if name != PLAIN}
    for record in records:
        rates[record.drafter].append((record.concurrency, ratios.get(record.key, 0.0)))
        costs[record.drafter].append((record.concurrency, record.cost_per_million(cost_per_hour)))
        if record.drafter != PLAIN and record.concurrency == fewest:
            positions[record.drafter] += enumerate(record.per_position, 1)
    charts = [
        chart("speed-up by requests at once", rates, colours),
        chart("cost of a million tokens by requests at once", costs, colours),
        chart(f"accepted up to draft token k, {fewest} at once", positions, colours),
    ]
    columns: dict[str, Column] = {
        "drafter": "{.drafter}",
        "at once": "{.concurrency}",
        "α": lambda r: "" if r.drafter == PLAIN else f"{r.acceptance:.0%}",
        "τ": "{.tokens_per_pass:.2f}",
        "tokens/s": "{.tokens_per_second:.1f}",
        "speed-up": lambda r: optional(ratios.get(r.key), ".2f", ""),
        "by CPU time": lambda r: optional(by_cpu.get(r.key), ".2f", ""),
        "latency p50": "{.latency_p50:.2f} s",
        "draft": lambda r: f"{r.draft_seconds / r.seconds:.0%}",
        "verify": lambda r: f"{r.verify_seconds / r.seconds:.0%}",
        "accept": lambda r: f"{r.accept_seconds / r.seconds:.0%}",
        "cost per million": lambda r: f"{r.cost_per_million(cost_per_hour):.3g}",
    }
    title = f"{category}, temperature {temperature:g}"
    return section(title, charts, list(columns), cells_of(records, columns))
