"""Goals and results of the controller benchmark as tables and JSON."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from foreword.bench.control.changes import LEAST_WORST, MOST_RATIO, MixedTraffic, Reaction
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
    figure: str  # the most critical value
    misses: Sequence[str] = ()  # where it failed


def cell_verdicts(cells: Sequence[ControlCell]) -> list[GoalResult]:
    """Judge every category and batch size; a cell fails if its interval is below the limit."""

    def to_plain(cell: ControlCell) -> Interval:
        return cell.ratios[CONTROLLER]

    def to_best(cell: ControlCell) -> Interval:
        return cell.best.ratio

    mixed = [cell for cell in cells if cell.kind == MIXED]
    found = [
        _of_cells(f"every cell at least {LEAST_RATIO} of plain", cells, to_plain, LEAST_RATIO),
        _of_cells(f"every cell at least {LEAST_OF_BEST} of the best fixed", cells, to_best, LEAST_OF_BEST),
        _of_cells("mixed traffic above the best fixed", mixed, to_best, LEAST_OF_BEST_MIXED),
    ]
    return [verdict for verdict in found if verdict is not None]


def _of_cells(
    goal: str, cells: Sequence[ControlCell], ratio: Callable[[ControlCell], Interval], least: float
) -> GoalResult | None:
    if not cells:
        return None
    worst = min(cells, key=lambda cell: ratio(cell).high)
    missing = [_cell_text(cell, ratio(cell)) for cell in cells if ratio(cell).high < least]
    return GoalResult(goal, not missing, _cell_text(worst, ratio(worst)), missing)


def _cell_text(cell: ControlCell, ratio: Interval) -> str:
    return f"{cell.kind}, batch {cell.batch}: {shown(ratio)}"


def reaction_verdicts(reactions: Sequence[Reaction]) -> list[GoalResult]:
    """Judge reaction time, and the rate meanwhile."""
    found = []
    for within in sorted({one.within for one in reactions}):
        these = [one for one in reactions if one.within == within]
        late = [_late(one) for one in these if one.seconds > within]
        what = "off" if within == min(one.within for one in reactions) else "on again"
        slowest = max(these, key=lambda one: one.seconds)
        found.append(GoalResult(f"{what} within {within:.0f} s", not late, _late(slowest), late))
    if reactions:
        low = [_low(one) for one in reactions if one.worst < LEAST_WORST]
        worst = min(reactions, key=lambda one: one.worst)
        found.append(GoalResult(f"worst five seconds {LEAST_WORST} of plain", not low, _low(worst), low))
    return found


def _late(one: Reaction) -> str:
    return f"{one.condition} ({one.phase}): {one.seconds:.1f} s"


def _low(one: Reaction) -> str:
    return f"{one.condition} ({one.phase}): {one.worst:.2f}"


def other_verdicts(mixed: MixedTraffic | None, probe_share: float) -> list[GoalResult]:
    """Judge plain requests next to others, and exploration time."""
    spent, is_dear = f"{100 * probe_share:.2f}%", probe_share > MOST_PROBES
    goal = f"probes take at most {100 * MOST_PROBES:.0f}% of the time"
    found = [GoalResult(goal, not is_dear, spent, _if(is_dear, spent))]
    if mixed is not None:
        figure = f"{mixed.ratio:.3f}"
        goal = f"plain requests beside others: p95 at most {MOST_RATIO}"
        found.insert(0, GoalResult(goal, mixed.holds, figure, _if(not mixed.holds, figure)))
    return found


def _if(is_missed: bool, figure: str) -> Sequence[str]:
    return (figure,) if is_missed else ()


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
