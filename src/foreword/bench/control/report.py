"""A whole run, as tables for people and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from foreword.bench.control.cells import CONTROLLER, Cell
from foreword.bench.control.conditions import LEAST_WORST, Reaction
from foreword.bench.control.mixed import MixedTraffic
from foreword.bench.control.statistics import Interval
from foreword.bench.line_charts import Chart

MOST_PROBES = 0.01


@dataclass(frozen=True)
class ControlReport:
    """All that was measured."""

    cells: Sequence[Cell]
    reactions: Sequence[Reaction] = ()
    mixed: MixedTraffic | None = None
    probe_share: float = 0.0  # of the time of all steps, for guesses that were only compared with the text

    @property
    def failures(self) -> list[str]:
        """What is promised and did not hold."""
        found = [
            f"{cell.kind}, batch {cell.batch}: {_shown(cell.ratios[CONTROLLER])} of plain, "
            f"{_shown(cell.best.ratio)} of {cell.best.label}"
            for cell in self.cells
            if not cell.holds
        ]
        found += [
            f"{one.condition} ({one.phase}): worst five seconds {one.worst:.2f} of plain"
            for one in self.reactions
            if one.worst < LEAST_WORST
        ]
        if self.mixed is not None and not self.mixed.holds:
            found.append(f"plain requests beside others wait {self.mixed.ratio:.2f}x as long (p95)")
        if self.probe_share > MOST_PROBES:
            found.append(f"probes took {100 * self.probe_share:.2f}% of the time")
        return found

    def as_json(self) -> dict[str, Any]:
        mixed = None if self.mixed is None else {**asdict(self.mixed), "ratio": self.mixed.ratio}
        return {
            "cells": [{**asdict(cell), "holds": cell.holds} for cell in self.cells],
            "conditions": [asdict(one) for one in self.reactions],
            "mixed": mixed,
            "probe_share": self.probe_share,
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
    ):
        table.add_column(name, justify="left" if name in ("kind", "best fixed\nof half") else "right")
    for cell in cells:
        colour = "green" if cell.holds else "red"
        table.add_row(
            cell.kind,
            str(cell.batch),
            f"{cell.plain_rate:.1f}",
            f"[{colour}]{_shown(cell.ratios[CONTROLLER])}[/{colour}]",
            cell.best.label,
            _shown(cell.best.ratio),
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


def _shown(ratio: Interval) -> str:
    return f"{ratio.middle:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
