"""Results of `bench drafters`: table, picture, slowest prompts, and a policy file with the best drafters."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from glob import escape
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from foreword.bench.drafters.decode import DecodeRun, Record, cpu_speedup
from foreword.bench.methods import Method, is_random
from foreword.bench.pictures import draw_bars, saved_figure
from foreword.bench.skeleton import optional, ratio
from foreword.control.policy_file.document import OTHER

ALL = "all"  # label of the row over all categories


@dataclass(frozen=True)
class DrafterRow:
    """Results of a drafter in one category. A ratio is one of sums over the prompts, not a mean of ratios."""

    drafter: str
    category: str
    prompts: int
    alpha: float | None  # accepted / verified; None: nothing was drafted
    tau: float  # tokens per target pass while decoding
    plain_tokens_per_second: float
    tokens_per_second: float
    speedup: float  # relative to plain decoding of the same prompts
    draft_ms: float  # per step, as the next three
    verify_ms: float
    accept_ms: float
    rest_ms: float
    plain_step_ms: float  # step of plain decoding
    memory_bytes: int | None  # maximum that the drafter reported
    different_texts: int  # answers that differ from plain decoding: 0 except for rounding ties
    device_ms_per_token: float  # time of drafting and target per token
    plain_device_ms_per_token: float
    passes: int  # while decoding
    drafted_per_position: tuple[int, ...]  # drafts with a token at this position
    accepted_per_position: tuple[int, ...]  # drafts accepted up to this position
    cpu_speedup: float | None = None  # by CPU time; None: another device did the work


def summarise(records: Sequence[Record]) -> list[DrafterRow]:
    """Return the rows of each drafter: its categories in order of appearance, then all together."""
    rows = []
    for drafter in _distinct([record.drafter for record in records]):
        of_drafter = [record for record in records if record.drafter == drafter]
        for kind in _distinct([record.category for record in of_drafter]):
            rows.append(_row(drafter, kind, [record for record in of_drafter if record.category == kind]))
        rows.append(_row(drafter, ALL, of_drafter))
    return rows


def _row(drafter: str, category: str, records: Sequence[Record]) -> DrafterRow:
    total = DecodeRun.total([record.speculative for record in records])
    plain = DecodeRun.total([record.plain for record in records])
    return DrafterRow(
        drafter=drafter,
        category=category,
        prompts=len(records),
        alpha=total.accepted / total.drafted if total.drafted else None,
        tau=total.tokens_per_pass,
        plain_tokens_per_second=plain.tokens_per_second,
        tokens_per_second=total.tokens_per_second,
        speedup=total.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 1.0,
        draft_ms=ratio(1e3 * total.draft_seconds, total.passes),
        verify_ms=ratio(1e3 * total.verify_seconds, total.passes),
        accept_ms=ratio(1e3 * total.accept_seconds, total.passes),
        rest_ms=ratio(1e3 * (total.seconds - total.device_seconds), total.passes),
        plain_step_ms=ratio(1e3 * plain.seconds, plain.passes),
        memory_bytes=total.memory_bytes,
        different_texts=sum(not record.identical for record in records),
        device_ms_per_token=ratio(1e3 * total.device_seconds, total.tokens),
        plain_device_ms_per_token=ratio(1e3 * plain.device_seconds, plain.tokens),
        passes=total.passes,
        drafted_per_position=total.drafted_per_position,
        accepted_per_position=total.accepted_per_position,
        cpu_speedup=cpu_speedup(records),
    )


def _distinct(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))


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


def drafter_table(rows: Sequence[DrafterRow], title: str) -> Table:
    """Return a table with one line per drafter and category, 80 columns wide."""
    caption = _CAPTION + (_RANDOM if any(is_random(row.drafter) for row in rows) else "")
    table = Table(title=Text(title), caption=caption, box=SIMPLE_HEAD, padding=0)
    table.title_justify = table.caption_justify = "left"
    table.add_column("drafter", overflow="fold")
    for name in ("n", "α", "τ", "speed-up", "draft", "verify", "accept", "rest", "memory", "differ"):
        table.add_column(name, justify="right", no_wrap=True)
    for drafter, of_drafter in groupby(rows, attrgetter("drafter")):
        table.add_row(Text(drafter, "bold"))
        for row in of_drafter:
            table.add_row(Text(f"  {row.category}"), *_cells(row), end_section=row.category == ALL)
    return table


def _cells(row: DrafterRow) -> list[str]:
    colour = "green" if row.speedup >= 1 else "yellow"
    gains = [optional(row.alpha, ".2f"), f"{row.tau:.2f}", f"[{colour}]{row.speedup:.2f}×[/{colour}]"]
    if is_random(row.drafter):  # none of its draft tokens is accepted
        gains = ["-", "-", "-"]
    return [
        str(row.prompts),
        *gains,
        f"{row.draft_ms:.2f}",
        f"{row.verify_ms:.1f}",
        f"{row.accept_ms:.2f}",
        f"{row.rest_ms:.2f}",
        _megabytes(row.memory_bytes),
        f"[red]{row.different_texts}[/red]" if row.different_texts else "0",
    ]


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:.{1 if size < 10e6 else 0}f} MB"


def plot_rows(rows: Sequence[DrafterRow], path: Path, title: str) -> None:
    """Draw τ and speed-up as grouped bars per category."""
    categories, drafters = _distinct([row.category for row in rows]), _distinct([row.drafter for row in rows])
    width = max(7.0, 1.2 + 0.3 * len(categories) * (len(drafters) + 1))
    labels = {"tau": "tokens per target pass (τ)", "speedup": "speed-up over plain decoding"}
    with saved_figure(path, width, 7.0, title) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True)
        for axes, (field, label) in zip((upper, lower), labels.items(), strict=True):
            heights = {
                drafter: {row.category: getattr(row, field) for row in rows if row.drafter == drafter}
                for drafter in drafters
            }
            draw_bars(axes, heights, (1.0, "plain decoding"), "%.1f")
            axes.set_ylabel(label)
            axes.margins(y=0.12)
        handles, names = upper.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=min(3, len(names)), frameon=False)


LEAST_RATIO = 0.95  # speed-up below which a single prompt is reported as slow
LEAST_TOKENS = 16  # minimum tokens of an answer that is judged alone, for reliable timing

RatedPrompt = tuple[str, str, float]  # category, key and speed-up of a prompt


@dataclass(frozen=True)
class Slowest:
    """The prompts with the lowest speed-up of one drafter."""

    drafter: str
    prompts: int  # prompts whose plain answer has at least `LEAST_TOKENS` tokens
    below: int  # how many of them are below `LEAST_RATIO`
    worst: Sequence[RatedPrompt]  # slowest prompts, slowest first
    cpu_speedup: float | None = None  # over all prompts, by CPU time; None: another device did the work
    cpu_below: int = 0  # as `below`, by CPU time
    cpu_worst: Sequence[RatedPrompt] = ()  # as `worst`, by CPU time

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "line": LEAST_RATIO}

    @property
    def line(self) -> str:
        """One line for people."""
        if not self.prompts:
            return f"{self.drafter}: no plain answer has {LEAST_TOKENS} tokens, so no prompt is judged alone"
        line = f"{self.drafter}: {self.below} of {self.prompts} prompts below {LEAST_RATIO:.2f}×"
        line = f"{line}; slowest: {_shown(self.worst)}"
        if self.cpu_speedup is None:
            return line
        by_cpu = f"by CPU time {self.cpu_speedup:.2f}× in all, {self.cpu_below} below"
        return f"{line}; {by_cpu}: {_shown(self.cpu_worst)}"


def slowest_prompts(records: Sequence[Record], most: int = 5) -> list[Slowest]:
    """Return the slowest `most` prompts of each drafter, in order of appearance."""
    slowest = []
    for drafter in _distinct([record.drafter for record in records]):
        of_drafter = [record for record in records if record.drafter == drafter]
        judged = [record for record in of_drafter if record.plain.tokens >= LEAST_TOKENS]
        below, worst = _lowest([(record.speedup, record) for record in judged], most)
        row = Slowest(drafter, len(judged), below, worst)
        by_cpu = [(speedup, record) for record in judged if (speedup := cpu_speedup([record])) is not None]
        if len(by_cpu) == len(judged):
            below, worst = _lowest(by_cpu, most)
            row = replace(row, cpu_speedup=cpu_speedup(of_drafter), cpu_below=below, cpu_worst=worst)
        slowest.append(row)
    return slowest


def _lowest(rated: Sequence[tuple[float, Record]], most: int) -> tuple[int, tuple[RatedPrompt, ...]]:
    """Return the number of prompts below `LEAST_RATIO`, and at most `most` prompts with the lowest speed-up."""
    ordered = sorted((speedup, record.prompt, record.category) for speedup, record in rated)
    below = sum(speedup < LEAST_RATIO for speedup, _, _ in ordered)
    return below, tuple((category, key, speedup) for speedup, key, category in ordered[:most])


def _shown(prompts: Sequence[RatedPrompt]) -> str:
    return ", ".join(f"{speedup:.2f}× {category} {key}" for category, key, speedup in prompts)


WORTH_TRYING = 0.95  # minimum speed-up of a drafter in a policy file, measured with drafts at every step
MOST_DRAFTERS = 3  # maximum drafters per cohort
EVERYTHING_ELSE = "rest"

WRITTEN_BY = "foreword tune"


def recommend(
    rows: Sequence[DrafterRow], methods: Sequence[Method], made_with: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a policy file with the best drafters per category, best first.

    The controller chooses between them while the server runs.
    """
    names = _names([method.label for method in methods], ())
    configs = {names[method.label]: method.config for method in methods if method.config is not None}
    kinds = _distinct([row.category for row in rows if row.category != ALL])
    chosen = {kind: _fast_drafters(rows, kind) for kind in (*kinds, ALL)}
    used = {names[row.drafter] for of_kind in chosen.values() for row in of_kind}
    cohort_names = _names(kinds, (OTHER, EVERYTHING_ELSE))
    cohorts = [_cohort(cohort_names[kind], kind, chosen[kind], names) for kind in kinds]
    return {
        "version": 1,
        "defaults": {"state": "on"},
        "drafters": {name: config for name, config in configs.items() if name in used},
        "cohorts": [*cohorts, _cohort(EVERYTHING_ELSE, None, chosen[ALL], names)],
        "split": ["temperature_band"],
        "notes": {
            "by": WRITTEN_BY,
            **made_with,
            "speedup_over_plain": _speedups(rows),
            "left_out": {  # drafters that changed texts
                row.drafter: f"{row.different_texts} of {row.prompts} texts differ from plain decoding"
                for row in rows
                if row.category == ALL and row.different_texts
            },
        },
    }


def _fast_drafters(rows: Sequence[DrafterRow], kind: str) -> list[DrafterRow]:
    """Return the rows of a category's fastest drafters, fastest first; drafters that changed a text are left out."""
    fast = [r for r in rows if r.category == kind and r.speedup >= WORTH_TRYING and not r.different_texts]
    return sorted(fast, key=lambda row: -row.speedup)[:MOST_DRAFTERS]


def _cohort(
    name: str, kind: str | None, fast: Sequence[DrafterRow], names: Mapping[str, str]
) -> dict[str, Any]:
    """Return a cohort's rule for the requests of a category (None: all); without fast drafters, speculation is off."""
    rule: dict[str, Any] = {"name": name, "match": {} if kind is None else {"metadata.task": escape(kind)}}
    return rule | ({"drafters": [names[row.drafter] for row in fast]} if fast else {"state": "off"})


def _speedups(rows: Sequence[DrafterRow]) -> dict[str, dict[str, float]]:
    table: dict[str, dict[str, float]] = {}
    for row in rows:
        table.setdefault(row.drafter, {})[row.category] = round(row.speedup, 3)
    return table


def _names(labels: Sequence[str], taken: Sequence[str]) -> dict[str, str]:
    """Return a short, unique name in a policy file for each label; names in `taken` are not used."""
    names: dict[str, str] = {}
    for label in labels:
        short = name = re.sub(r"[^\w.+-]+", "-", label).strip("-") or "unnamed"
        number = 1
        while name in taken or name in names.values():
            number += 1
            name = f"{short}-{number}"
        names[label] = name
    return names
