"""A whole run, as tables for people and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from foreword.bench.control.cells import CONTROLLER, Cell
from foreword.bench.control.conditions import Reaction
from foreword.bench.control.goals import Verdict, cell_verdicts, other_verdicts, reaction_verdicts, shown
from foreword.bench.control.mixed import MixedTraffic
from foreword.bench.line_charts import Chart


@dataclass(frozen=True)
class ControlReport:
    """All that was measured."""

    cells: Sequence[Cell]
    reactions: Sequence[Reaction] = ()
    mixed: MixedTraffic | None = None
    probe_share: float = 0.0  # of the time of all steps, for guesses that were only compared with the text

    @property
    def verdicts(self) -> list[Verdict]:
        """What is promised, one by one."""
        return [
            *cell_verdicts(self.cells),
            *reaction_verdicts(self.reactions),
            *other_verdicts(self.mixed, self.probe_share),
        ]

    @property
    def failures(self) -> list[str]:
        """What is promised and did not hold."""
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


def cell_table(cells: Sequence[Cell], title: str) -> Table:
    """A line for every cell. Fits 80 columns."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.title_justify = "left"
    for name in (
        "kind",
        "batch",
        "plain\ntok/s",
        "controller\nx plain",
        "best fixed\nof half",
        "controller\nx best",
        "learning\nx plain",
    ):
        table.add_column(name, justify="left" if name in ("kind", "best fixed\nof half") else "right")
    for cell in cells:
        colour = "green" if cell.holds else "red"
        table.add_row(
            cell.kind,
            str(cell.batch),
            f"{cell.plain_rate:.1f}",
            f"[{colour}]{shown(cell.ratios[CONTROLLER])}[/{colour}]",
            cell.best.label,
            shown(cell.best.ratio),
            "" if cell.learning is None else f"{cell.learning:.2f}",
        )
    return table


def reaction_table(reactions: Sequence[Reaction]) -> Table:
    """A line for every change."""
    table = Table("what changes", "", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in ("settled\nafter s", "then\nx plain", "worst 5 s\nx plain"):
        table.add_column(name, justify="right")
    for one in reactions:
        cells = (f"{one.seconds:.1f}", f"{one.ratio:.2f}", f"{one.worst:.2f}")
        table.add_row(one.condition, one.phase, *cells)
    return table


def ratio_chart(cells: Sequence[Cell]) -> Chart:
    """The controller's ratio to plain decoding by batch, a line for every kind."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        lines.setdefault(cell.kind, []).append((float(cell.batch), cell.ratios[CONTROLLER].middle))
    return Chart("requests at once", "controller, relative to plain", lines, level=(1.0, "plain decoding"))
