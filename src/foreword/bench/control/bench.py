"""`foreword bench control` on one engine: its measurements, goals, tables and JSON."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any

from rich.table import Table
from rich.text import Text

from foreword.bench.control import changes
from foreword.bench.control.timeline import EngineLine
from foreword.bench.control.windows import (
    CONTROLLER,
    LEAST_OF_BEST,
    LEAST_RATIO,
    MIXED,
    PLAIN_ARM,
    ControlArm,
    ControlCell,
    EngineStation,
    Prompts,
    measure_cells,
)
from foreword.bench.methods import Method
from foreword.bench.pictures import Chart
from foreword.bench.prompts import BenchPrompt
from foreword.bench.skeleton import Column, InTable, Interval, optional, table
from foreword.control.policy import MeasuredPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.registry import drafter_kinds
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.loader import LoadedModel
from foreword.engine.profiles import load_or_measure_costs
from foreword.engine.prompts import encode_prompt
from foreword.errors import RequestError
from foreword.progress import StageProgress
from foreword.speculation.drafting import Drafter

MOST_PROBES = 0.01  # maximum fraction of step time for shadow drafts
LEAST_OF_BEST_MIXED = 1.0  # minimum ratio to the best fixed setting with mixed requests


@dataclass(frozen=True)
class GoalResult:
    """Whether a goal was reached, and the figures that decide it."""

    goal: Annotated[str, InTable("goal")]
    holds: Annotated[bool, InTable("", lambda holds: Text("pass", "green") if holds else Text("miss", "red"))]
    figure: Annotated[str, InTable("closest")]  # the figure closest to the limit, or furthest beyond it
    misses: Sequence[str] = ()  # figures beyond the limit


Margin = tuple[
    float, str
]  # distance of a figure from its goal's limit, negative beyond the limit; and the figure


def _judged(goal: str, margins: Iterable[Margin]) -> list[GoalResult]:
    """Return the goal's result; without figures, an empty list."""
    ordered = sorted(margins, key=lambda pair: pair[0])
    missed = [figure for margin, figure in ordered if margin < 0]
    return [GoalResult(goal, not missed, ordered[0][1], missed)] if ordered else []


def _cell_margins(ratios: Iterable[tuple[ControlCell, Interval]], least: float) -> list[Margin]:
    """Return the margins of the cells' ratios; a ratio is beyond the limit if its whole interval is."""
    return [
        (ratio.high - least, f"{cell.kind}, batch {cell.batch}: {shown(ratio)}") for cell, ratio in ratios
    ]


def shown(ratio: Interval) -> str:
    """Return the ratio and its bounds, such as 1.20 (1.10-1.30)."""
    return f"{ratio.middle:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


@dataclass(frozen=True)
class ControlBenchReport:
    """All results of the benchmark."""

    cells: Sequence[ControlCell]
    reactions: Sequence[changes.Reaction] = ()
    mixed: changes.MixedTraffic | None = None
    probe_share: float = 0.0  # fraction of step time that the controller spent on shadow drafts

    @property
    def verdicts(self) -> list[GoalResult]:
        """The results of all goals."""
        to_best = [(cell, cell.best.ratio) for cell in self.cells]
        goals = {
            f"every cell at least {LEAST_RATIO} of plain": _cell_margins(
                [(cell, cell.ratios[CONTROLLER]) for cell in self.cells], LEAST_RATIO
            ),
            f"every cell at least {LEAST_OF_BEST} of the best fixed": _cell_margins(to_best, LEAST_OF_BEST),
            "mixed traffic above the best fixed": _cell_margins(
                [(cell, ratio) for cell, ratio in to_best if cell.kind == MIXED], LEAST_OF_BEST_MIXED
            ),
        }
        for switched, within in (("off", changes.OFF_WITHIN), ("on again", changes.ON_WITHIN)):
            goals[f"{switched} within {within:.0f} s"] = [
                (within - one.seconds, f"{one.condition} ({one.phase}): {one.seconds:.1f} s")
                for one in self.reactions
                if one.within == within
            ]
        goals[f"worst five seconds {changes.LEAST_WORST} of plain"] = [
            (one.worst - changes.LEAST_WORST, f"{one.condition} ({one.phase}): {one.worst:.2f}")
            for one in self.reactions
        ]
        goals[f"plain requests beside others: p95 at most {changes.MOST_RATIO}"] = (
            [] if self.mixed is None else [(changes.MOST_RATIO - self.mixed.ratio, f"{self.mixed.ratio:.3f}")]
        )
        probes = (MOST_PROBES - self.probe_share, f"{100 * self.probe_share:.2f}%")
        goals[f"probes take at most {100 * MOST_PROBES:.0f}% of the time"] = [probes]
        return [result for goal, margins in goals.items() for result in _judged(goal, margins)]

    @property
    def failures(self) -> list[str]:
        """One line for each figure that misses its goal."""
        return [f"{one.goal}: {miss}" for one in self.verdicts for miss in one.misses]

    def as_json(self) -> dict[str, Any]:
        return {
            "cells": [{**asdict(cell), "holds": cell.holds} for cell in self.cells],
            "conditions": list(map(asdict, self.reactions)),
            "mixed": None if self.mixed is None else {**asdict(self.mixed), "ratio": self.mixed.ratio},
            "probe_share": self.probe_share,
            "goals": list(map(asdict, self.verdicts)),
            "failures": self.failures,
            "passed": not self.failures,
        }


def cell_table(cells: Sequence[ControlCell], title: str) -> Table:
    """Return a table with one line per cell, 80 columns wide."""

    def to_plain(cell: ControlCell) -> Text:
        return Text(shown(cell.ratios[CONTROLLER]), "green" if cell.holds else "red")

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


def ratio_chart(cells: Sequence[ControlCell]) -> Chart:
    """Return a chart of the controller's ratio to plain decoding by batch size, one line per category."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        lines.setdefault(cell.kind, []).append((float(cell.batch), cell.ratios[CONTROLLER].middle))
    return Chart("requests at once", "controller, relative to plain", lines, level=(1.0, "plain decoding"))


SLOWER = 10.0  # factor by which the brake slows drafters


@dataclass(frozen=True)
class ControlSizes:
    """Size of the benchmark."""

    kinds: Sequence[str]  # categories; empty: all, and mixed
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32)
    windows: int = 12  # measured windows per arm and cell
    tokens: int = 48  # mean tokens per request and window
    phase_seconds: float = 15.0  # duration of a phase before, during or after a change; 0: no changes
    learning_seconds: float = 5.0  # time per cell that the controller has before it is measured
    mixed_batch: int = 8
    most_kinds: int = 100  # maximum number of categories if none are named

    @staticmethod
    def of(
        quick: bool,
        kinds: Sequence[str] = (),
        batches: Sequence[int] | None = None,
        windows: int | None = None,
        changes: bool = True,
    ) -> "ControlSizes":
        """Return the full size, or with `quick` a size for 15 minutes on a small machine, with these changes."""
        size = replace(QUICK if quick else ControlSizes(()), kinds=kinds)
        if batches is not None:
            size = replace(size, batches=batches)
        if windows is not None:
            size = replace(size, windows=windows)
        return size if changes else replace(size, phase_seconds=0.0)

    def check(self, known: Set[str]) -> None:
        """Raise `RequestError` for categories without prompts."""
        for kind in self.kinds:
            if kind not in {*known, MIXED}:
                raise RequestError(f"--kinds: {kind!r} is none of {', '.join(sorted(known))}, {MIXED}")

    def chosen(self, known: Sequence[str]) -> list[str]:
        """Return the categories to measure; `known` are those that have prompts."""
        return list(self.kinds) or [*known[: self.most_kinds - 1], MIXED]


QUICK = ControlSizes((), windows=6, tokens=24, phase_seconds=7.0, learning_seconds=3.0, most_kinds=3)


def measure_control(
    loaded: LoadedModel,
    prompts: Sequence[BenchPrompt],
    fixed: Sequence[Method],
    sizes: ControlSizes,
    on_progress: StageProgress,
) -> ControlBenchReport:
    """Compare the default policy with plain decoding and with settings that draft at every step."""
    brake, policy = changes.Brake(), MeasuredPolicy()
    settings = {method.label: _at_every_step(method) for method in fixed}
    controller = ControlArm(CONTROLLER, None)
    arms = [PLAIN_ARM, controller, *(ControlArm(label, setting) for label, setting in settings.items())]
    parsed = [SpeculationConfig.parse(setting) for setting in settings.values()]
    config = EngineConfig(max_num_seqs=max(*sizes.batches, sizes.mixed_batch))

    def build(wanted: SpeculationConfig) -> Drafter:
        return changes.slowed(loaded.build_drafter(wanted), brake)

    parts = EngineParts(config, policy, build, _default(loaded), offered=parsed)
    engine = EngineCore(loaded.decoder, loaded.vocabulary(), parts)
    load_or_measure_costs(engine)
    known = _encoded(loaded, prompts)
    kinds = sizes.chosen([kind for kind in known.kinds if kind != MIXED])
    try:
        # If a drafter remembers answers, every window needs a tenant of its own.
        methods = [name for config in (_default(loaded), *parsed) for name in config.method]
        learns = any(drafter_kinds()[name].traits.learns_answers for name in methods)
        station = EngineStation(engine, known, sizes.tokens, has_new_tenants=learns)
        line = EngineLine(engine, known)
        wanted = [(kind, batch) for batch in sizes.batches for kind in kinds]
        cells = measure_cells(station, wanted, arms, sizes.windows, on_progress, sizes.learning_seconds)
        reactions, mixed = list[changes.Reaction](), None
        if seconds := sizes.phase_seconds:
            slow = partial(brake.pulled, SLOWER)
            planned = changes.conditions(
                kinds[-1], kinds[0], max(sizes.batches), seconds, slow, changes.busy_core
            )
            reactions = changes.measure_conditions(line, planned, controller, on_progress)
            on_progress("mixed traffic", 0, 1)
            mixed = changes.measure_mixed(line, controller, sizes.mixed_batch, 3 * seconds)
        return ControlBenchReport(cells, reactions, mixed, policy.explorer.share)
    finally:
        engine.close()


def default_fixed(loaded: LoadedModel) -> list[Method]:
    """Return the first default drafter at several depths, and a lookup."""
    config = _default(loaded)
    first = config.method[0]
    alone = SpeculationConfig.parse({"method": first}, config).as_mapping()
    return [
        *(Method(f"{first} {depth}", {**alone, "num_speculative_tokens": depth}) for depth in (1, 2, 4)),
        Method("ngram 4", {"method": "ngram", "num_speculative_tokens": 4}),
    ]


def _default(loaded: LoadedModel) -> SpeculationConfig:
    """Return the model's default speculation; raise `RequestError` if it is off."""
    choice = loaded.choose_speculation("auto")
    if choice.config is None:
        raise RequestError(f"there is nothing to control: {choice.reason}")
    return choice.config


def _at_every_step(method: Method) -> Mapping[str, Any]:
    if method.config is None:
        raise RequestError("--fixed: the default is always measured; name other drafters")
    return {**method.config, "fixed": True}


def _encoded(loaded: LoadedModel, prompts: Sequence[BenchPrompt]) -> Prompts:
    by_kind: dict[str, list[list[int]]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.category, []).append(encode_prompt(loaded.tokenizer, prompt.text))
    return Prompts(by_kind)
