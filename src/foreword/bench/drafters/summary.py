"""Summary per drafter and category as table and picture, and the slowest prompts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from foreword.bench.drafters.decode import DecodeRun, Record, cpu_speedup
from foreword.bench.methods import is_random
from foreword.bench.pictures import draw_bars, new_figure, save_figure

ALL = "all"
"""Label of the row over all categories."""


@dataclass(frozen=True)
class DrafterRow:
    """A drafter on one category. Ratios are of sums over prompts, never averaged."""

    drafter: str
    category: str
    prompts: int
    alpha: float | None  # accepted / verified; None: nothing was drafted
    tau: float  # tokens per target pass while decoding
    plain_tokens_per_second: float
    tokens_per_second: float
    speedup: float  # relative to plain decoding of the same prompts
    draft_ms: float  # per step, like the next three
    verify_ms: float
    accept_ms: float
    rest_ms: float
    plain_step_ms: float  # of plain decoding
    memory_bytes: int | None  # maximum that the drafter reported
    different_texts: int  # answers that differ from plain decoding: 0 except for rounding ties
    # Device time of drafting and target per token.
    device_ms_per_token: float
    plain_device_ms_per_token: float
    passes: int  # while decoding
    drafted_per_position: tuple[int, ...]  # drafts with a token at this position
    accepted_per_position: tuple[int, ...]  # drafts accepted up to this position
    cpu_speedup: float | None = None  # by CPU time; None if another device did the work


def summarise(records: Sequence[Record]) -> list[DrafterRow]:
    """Return rows per drafter: its categories in order of appearance, then all together."""
    rows = []
    for drafter in _distinct([record.drafter for record in records]):
        own = [record for record in records if record.drafter == drafter]
        for category in _distinct([record.category for record in own]):
            rows.append(_row(drafter, category, [r for r in own if r.category == category]))
        rows.append(_row(drafter, ALL, own))
    return rows


def _row(drafter: str, category: str, records: Sequence[Record]) -> DrafterRow:
    speculative = [record.speculative for record in records]
    plain = [record.plain for record in records]
    steps = sum(run.passes for run in speculative)
    drafted = sum(run.drafted for run in speculative)
    sizes = [run.memory_bytes for run in speculative if run.memory_bytes is not None]

    def ms_per_step(seconds: float) -> float:
        return _share(1e3 * seconds, steps)

    return DrafterRow(
        drafter=drafter,
        category=category,
        prompts=len(records),
        alpha=sum(run.accepted for run in speculative) / drafted if drafted else None,
        tau=_share(sum(run.tokens for run in speculative), steps),
        plain_tokens_per_second=_rate(plain),
        tokens_per_second=_rate(speculative),
        speedup=_share(_rate(speculative), _rate(plain)) if _rate(plain) else 1.0,  # no plain tokens
        draft_ms=ms_per_step(sum(run.draft_seconds for run in speculative)),
        verify_ms=ms_per_step(sum(run.verify_seconds for run in speculative)),
        accept_ms=ms_per_step(sum(run.accept_seconds for run in speculative)),
        rest_ms=ms_per_step(sum(run.rest_seconds for run in speculative)),
        plain_step_ms=_share(1e3 * sum(run.seconds for run in plain), sum(run.passes for run in plain)),
        memory_bytes=max(sizes, default=None),
        different_texts=sum(not record.identical for record in records),
        device_ms_per_token=_device_ms(speculative),
        plain_device_ms_per_token=_device_ms(plain),
        passes=steps,
        drafted_per_position=summed([run.drafted_per_position for run in speculative]),
        accepted_per_position=summed([run.accepted_per_position for run in speculative]),
        cpu_speedup=cpu_speedup(records),
    )


def summed(lists: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Add lists element-wise; they may differ in length."""
    width = max((len(values) for values in lists), default=0)
    return tuple(sum(values[place] for values in lists if place < len(values)) for place in range(width))


def _device_ms(runs: Sequence[DecodeRun]) -> float:
    busy = sum(run.draft_seconds + run.verify_seconds + run.accept_seconds for run in runs)
    return _share(1e3 * busy, sum(run.tokens for run in runs))


def _rate(runs: Sequence[DecodeRun]) -> float:
    return _share(sum(run.tokens for run in runs), sum(run.seconds for run in runs))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _distinct(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))


_FIGURES = ("n", "α", "τ", "speed-up", "draft", "verify", "accept", "rest", "memory", "differ")


def drafter_table(rows: Sequence[DrafterRow], title: str) -> Table:
    """Return a table by drafter with one line per category, 80 columns wide."""
    caption = _CAPTION + (_RANDOM if any(is_random(row.drafter) for row in rows) else "")
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=0)
    table.title_justify = table.caption_justify = "left"
    table.add_column("drafter", overflow="fold")
    for name in _FIGURES:
        table.add_column(name, justify="right", no_wrap=True)
    shown = ""
    for row in rows:
        if row.drafter != shown:
            table.add_row(f"[bold]{row.drafter}[/bold]")
            shown = row.drafter
        table.add_row(f"  {row.category}", *_cells(row), end_section=row.category == ALL)
    return table


_CAPTION = (
    "n: prompts. α: draft tokens accepted, of those verified. τ: tokens per target pass. Speed-up: tokens per second "
    "over all prompts of the line, relative to plain decoding of the same prompts in this run. Draft, verify, "
    "accept, rest: milliseconds per step. All without the prompt's own passes. Memory: what the drafter adds. "
    "Differ: texts that are not those of plain decoding."
)

_RANDOM = (
    " Model=random: random weights. Such a head costs what a trained one costs and none of its drafts is accepted, so "
    "that α, τ and speed-up are left out."
)


def _cells(row: DrafterRow) -> list[str]:
    colour = "green" if row.speedup >= 1 else "yellow"
    different = f"[red]{row.different_texts}[/red]" if row.different_texts else "0"
    judged = [
        "-" if row.alpha is None else f"{row.alpha:.2f}",
        f"{row.tau:.2f}",
        f"[{colour}]{row.speedup:.2f}×[/{colour}]",
    ]
    return [
        str(row.prompts),
        *(["-"] * len(judged) if is_random(row.drafter) else judged),
        f"{row.draft_ms:.2f}",
        f"{row.verify_ms:.1f}",
        f"{row.accept_ms:.2f}",
        f"{row.rest_ms:.2f}",
        _megabytes(row.memory_bytes),
        different,
    ]


def _megabytes(size: int | None) -> str:
    if size is None:
        return "-"
    return f"{size / 1e6:.1f} MB" if size < 10e6 else f"{size / 1e6:.0f} MB"


def plot_rows(rows: Sequence[DrafterRow], path: Path, title: str) -> None:
    """Draw τ and speed-up as grouped bars per category."""
    categories, drafters = _distinct([row.category for row in rows]), _distinct([row.drafter for row in rows])
    figure = new_figure(max(7.0, 1.2 + 0.3 * len(categories) * (len(drafters) + 1)), 7.0)
    upper, lower = figure.subplots(2, 1, sharex=True)
    labels = {"tau": "tokens per target pass (τ)", "speedup": "speed-up over plain decoding"}
    for axes, (field, label) in zip((upper, lower), labels.items(), strict=True):
        heights = {
            drafter: {row.category: getattr(row, field) for row in rows if row.drafter == drafter}
            for drafter in drafters
        }
        draw_bars(axes, heights, (1.0, "plain decoding"), "%.1f")
        axes.set_ylabel(label)
        axes.margins(y=0.12)
    figure.suptitle(title, fontsize=12)
    handles, names = upper.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(3, len(names)), frameon=False)
    save_figure(figure, path)


LEAST_RATIO = 0.95
"""Minimum speed-up of a single prompt with the default drafter."""

MOST_SHOWN = 5

LEAST_TOKENS = 16
"""Minimum tokens of an answer that is judged alone, for reliable timing."""


@dataclass(frozen=True)
class Slowest:
    """The prompts with the lowest speed-up of one drafter."""

    drafter: str
    prompts: int  # with at least `LEAST_TOKENS`
    below: int  # below `LEAST_RATIO`
    worst: Sequence[tuple[str, str, float]]  # (category, prompt key, speed-up), lowest first
    cpu_speedup: float | None = None  # over all prompts, by CPU time; None if another device did the work
    cpu_below: int = 0
    cpu_worst: Sequence[tuple[str, str, float]] = ()

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "line": LEAST_RATIO}

    @property
    def line(self) -> str:
        """Return one line for people."""
        if not self.prompts:
            return f"{self.drafter}: no plain answer has {LEAST_TOKENS} tokens, so no prompt is judged alone"
        line = (
            f"{self.drafter}: {self.below} of {self.prompts} prompts below {LEAST_RATIO:.2f}×; "
            f"slowest: {_shown(self.worst)}"
        )
        if self.cpu_speedup is None:
            return line
        return (
            f"{line}; by CPU time {self.cpu_speedup:.2f}× in all, {self.cpu_below} below: "
            f"{_shown(self.cpu_worst)}"
        )


def slowest_prompts(records: Sequence[Record], most: int = MOST_SHOWN) -> list[Slowest]:
    """Return the slowest prompts per drafter, in order of appearance."""
    found = []
    for drafter in dict.fromkeys(record.drafter for record in records):
        all_own = [record for record in records if record.drafter == drafter]
        own = [record for record in all_own if record.plain.tokens >= LEAST_TOKENS]
        below, worst = _lowest([(record.speedup, record) for record in own], most)
        by_cpu = [(ratio, record) for record in own if (ratio := cpu_speedup([record])) is not None]
        if len(by_cpu) < len(own):
            found.append(Slowest(drafter, len(own), below, worst))
        else:
            found.append(
                Slowest(drafter, len(own), below, worst, cpu_speedup(all_own), *_lowest(by_cpu, most))
            )
    return found


def _lowest(
    rated: Sequence[tuple[float, Record]], most: int
) -> tuple[int, tuple[tuple[str, str, float], ...]]:
    """Return how many are below the limit, and the lowest."""
    ordered = sorted((ratio, record.prompt, record.category) for ratio, record in rated)
    below = sum(ratio < LEAST_RATIO for ratio, _, _ in ordered)
    return below, tuple((category, key, ratio) for ratio, key, category in ordered[:most])


def _shown(prompts: Sequence[tuple[str, str, float]]) -> str:
    return ", ".join(f"{ratio:.2f}× {category} {key}" for category, key, ratio in prompts)
