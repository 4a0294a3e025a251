"""Goals of the controller benchmark, and its results as tables and JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from foreword.bench.control.changes import (
    LEAST_WORST,
    MOST_RATIO,
    OFF_WITHIN,
    ON_WITHIN,
    MixedTraffic,
    Reaction,
)
from foreword.bench.control.windows import CONTROLLER, LEAST_OF_BEST, LEAST_RATIO, MIXED, ControlCell
from foreword.bench.pictures import Chart
from foreword.bench.skeleton import Column, Interval, optional, table

MOST_PROBES = 0.01
"""Maximum fraction of step time for shadow drafts."""

LEAST_OF_BEST_MIXED = 1.0
"""Minimum ratio to the best fixed setting with mixed requests."""


@dataclass(frozen=True)
class GoalResult:
    """Result of one goal."""

    goal: str
    holds: bool
    figure: str  # the value closest to the limit, or furthest beyond it
    misses: Sequence[str] = ()  # values beyond the limit


def cell_verdicts(cells: Sequence[ControlCell]) -> list[GoalResult]:
    """Judge every category and batch size; a cell fails if its interval is below the limit."""
    to_plain = [(cell, cell.ratios[CONTROLLER]) for cell in cells]
    to_best = [(cell, cell.best.ratio) for cell in cells]
    mixed = [(cell, ratio) for cell, ratio in to_best if cell.kind == MIXED]
    goals = [
        (f"every cell at least {LEAST_RATIO} of plain", to_plain, LEAST_RATIO),
        (f"every cell at least {LEAST_OF_BEST} of the best fixed", to_best, LEAST_OF_BEST),
        ("mixed traffic above the best fixed", mixed, LEAST_OF_BEST_MIXED),
    ]
    return [_cell_verdict(*goal) for goal in goals if goal[1]]


def _cell_verdict(goal: str, ratios: Sequence[tuple[ControlCell, Interval]], least: float) -> GoalResult:
    ordered = sorted(ratios, key=lambda pair: pair[1].high)
    texts = [f"{cell.kind}, batch {cell.batch}: {shown(ratio)}" for cell, ratio in ordered]
    missed = [text for text, (_, ratio) in zip(texts, ordered, strict=True) if ratio.high < least]
    return GoalResult(goal, not missed, texts[0], missed)


def reaction_verdicts(reactions: Sequence[Reaction]) -> list[GoalResult]:
    """Judge reaction time, and the rate meanwhile."""
    found = []
    for what, within in (("off", OFF_WITHIN), ("on again", ON_WITHIN)):
        these = sorted((one for one in reactions if one.within == within), key=lambda one: -one.seconds)
        texts = [f"{one.condition} ({one.phase}): {one.seconds:.1f} s" for one in these]
        late = [text for text, one in zip(texts, these, strict=True) if one.seconds > within]
        if these:
            found.append(GoalResult(f"{what} within {within:.0f} s", not late, texts[0], late))
    if reactions:
        ordered = sorted(reactions, key=lambda one: one.worst)
        texts = [f"{one.condition} ({one.phase}): {one.worst:.2f}" for one in ordered]
        low = [text for text, one in zip(texts, ordered, strict=True) if one.worst < LEAST_WORST]
        found.append(GoalResult(f"worst five seconds {LEAST_WORST} of plain", not low, texts[0], low))
    return found


def other_verdicts(mixed: MixedTraffic | None, probe_share: float) -> list[GoalResult]:
    """Judge plain requests next to speculative ones, and the time of exploration."""
    found = []
    if mixed is not None:
        goal = f"plain requests beside others: p95 at most {MOST_RATIO}"
        found.append(_verdict(goal, mixed.holds, f"{mixed.ratio:.3f}"))
    goal = f"probes take at most {100 * MOST_PROBES:.0f}% of the time"
    found.append(_verdict(goal, probe_share <= MOST_PROBES, f"{100 * probe_share:.2f}%"))
    return found


def _verdict(goal: str, holds: bool, figure: str) -> GoalResult:
    return GoalResult(goal, holds, figure, () if holds else (figure,))


def goal_table(verdicts: Sequence[GoalResult]) -> Table:
    """Return a table with one line per goal."""
    columns: dict[str, Column] = {
        "goal": "{.goal}",
        "": lambda one: "[green]pass[/green]" if one.holds else "[red]miss[/red]",
        "closest": "{.figure}",
    }
    return table(verdicts, columns)


def shown(ratio: Interval) -> str:
    return f"{ratio.middle:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


@dataclass(frozen=True)
class ControlBenchReport:
    """All results."""

    cells: Sequence[ControlCell]
    reactions: Sequence[Reaction] = ()
    mixed: MixedTraffic | None = None
    probe_share: float = 0.0  # fraction of step time for shadow drafts

    @property
    def verdicts(self) -> list[GoalResult]:
        """Return all goals."""
        return [
            *cell_verdicts(self.cells),
            *reaction_verdicts(self.reactions),
            *other_verdicts(self.mixed, self.probe_share),
        ]

    @property
    def failures(self) -> list[str]:
        """Return the missed goals."""
        return [f"{one.goal}: {miss}" for one in self.verdicts for miss in one.misses]

    def as_json(self) -> dict[str, Any]:
        mixed = None if self.mixed is None else {**asdict(self.mixed), "ratio": self.mixed.ratio}
        return {
            "cells": [{**asdict(cell), "holds": cell.holds} for cell in self.cells],
            "conditions": [asdict(one) for one in self.reactions],
            "mixed": mixed,
            "probe_share": self.probe_share,
            "goals": [asdict(one) for one in self.verdicts],
            "failures": self.failures,
            "passed": not self.failures,
        }


def cell_table(cells: Sequence[ControlCell], title: str) -> Table:
    """Return a table with one line per cell, 80 columns wide."""

    def to_plain(cell: ControlCell) -> str:
        colour = "green" if cell.holds else "red"
        return f"[{colour}]{shown(cell.ratios[CONTROLLER])}[/{colour}]"

    columns: dict[str, Column] = {
        "kind": "{.kind}",
        "batch": "{.batch}",
        "plain\ntok/s": "{.plain_rate:.1f}",
        "controller\nx plain": to_plain,
        "best fixed\nof half": "{.best.label}",
        "controller\nx best": lambda cell: shown(cell.best.ratio),
        "learning\nx plain": lambda cell: optional(cell.learning, ".2f", ""),
    }
    return table(cells, columns, title)


def reaction_table(reactions: Sequence[Reaction]) -> Table:
    """Return a table with one line per change."""
    columns = {
        "what changes": "{.condition}",
        "": "{.phase}",
        "settled\nafter s": "{.seconds:.1f}",
        "then\nx plain": "{.ratio:.2f}",
        "worst 5 s\nx plain": "{.worst:.2f}",
    }
    return table(reactions, columns)


def ratio_chart(cells: Sequence[ControlCell]) -> Chart:
    """Return a chart of the controller's ratio to plain decoding by batch size, one line per category."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        lines.setdefault(cell.kind, []).append((float(cell.batch), cell.ratios[CONTROLLER].middle))
    return Chart("requests at once", "controller, relative to plain", lines, level=(1.0, "plain decoding"))
