"""`foreword simulate`: discrete-event simulation of targets and draft nodes."""

from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreword.cli.bench.common import provenance
from foreword.cli.cluster.goals import GoalOptions, search_goal
from foreword.cli.console import JsonOption, print_json, stage_bar, stdout
from foreword.cli.options.common import one_of
from foreword.cli.options.grouped import flag, option, options_command
from foreword.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from foreword.bench.skeleton import Column
    from foreword.simulate.calibration import Calibration
    from foreword.simulate.scenario import Scenario
    from foreword.simulate.world import SimulationResult

WAITING = ("worth", "all", "none")


@dataclass(frozen=True)
class FleetOptions:
    """Number and location of machines."""

    targets: int = option(8, "Number of targets.", min=1)
    nodes: int = option(2, "Number of draft nodes.", min=0)
    batch: int = option(16, "Batch size of a target.", min=1)
    zones: int = option(1, "Number of zones over which targets and nodes are distributed.", min=1)
    target_price: float = option(10.0, "Price of a target per hour.", min=0)
    node_price: float = option(1.0, "Price of a draft node per hour.", min=0)


@dataclass(frozen=True)
class CostOptions:
    """Costs of passes, drafts and network, from measurement files or options."""

    alpha: float | None = option(None, "Acceptance rate. Default: from --drafters, or 0.8.", min=0, max=1)
    step: Path | None = option(None, "Output of `foreword bench step --json`: pass times.", metavar="FILE")
    drafters: Path | None = option(None, "Output of `bench drafters --json`: drafts.", metavar="FILE")
    method: str | None = option(None, "Drafter of the --drafters file. Default: the fastest.")
    link: Path | None = option(None, "Output of `foreword bench link --json`: network.", metavar="FILE")
    pass_ms: float | None = option(None, "Milliseconds of a target pass over one token.", min=0.001)
    level_ms: float | None = option(None, "Milliseconds per level of a draft, on targets and nodes.", min=0)
    network_ms: float | None = option(None, "Round trip to a node in ms. Default: --link's, or 0.3.", min=0)
    zone_ms: float | None = option(None, "Round trip between zones in milliseconds. Default: 2.", min=0)

    def __post_init__(self) -> None:
        if self.method is not None and self.drafters is None:
            raise RequestError(f"--method {self.method} needs a file: give --drafters too, or leave it out")

    def calibration(self) -> "Calibration":
        """Return the costs; options take precedence over files."""
        from foreword.simulate.calibration import calibrate
        from foreword.simulate.scenario import AcceptanceCurve, PassTimes

        found = calibrate(self.step, self.drafters, self.link, self.method)
        costs, network = found.costs, found.network
        if self.zone_ms is not None:
            network = replace(network, zone_round_trip=self.zone_ms / 1e3)
        if self.pass_ms is not None:
            factor = self.pass_ms / 1e3 / costs.passes.seconds(1)
            times = tuple((rows, seconds * factor) for rows, seconds in costs.passes.points)
            costs = replace(costs, passes=PassTimes(times))
        if self.level_ms is not None:
            level = self.level_ms / 1e3
            costs = replace(costs, local=costs.local.scaled(level), node=costs.node.scaled(level))
        if self.network_ms is not None:
            network = replace(network, round_trip=self.network_ms / 1e3)
        if self.alpha is not None:
            found = replace(found, kinds=(AcceptanceCurve.of_rate(self.alpha),))
        kinds = found.kinds or (AcceptanceCurve.of_rate(0.8),)
        return replace(found, costs=costs, network=network, kinds=kinds)


@dataclass(frozen=True)
class LoadOptions:
    """Traffic, failures and policies of the simulated fleet."""

    k: int = option(5, "Draft tokens per pass.", min=1, max=60)
    rate: str | None = option(None, "Requests per second, or phases such as 20,60. Default: full batches.")
    prompt: int = option(512, "Tokens of a prompt.", min=0)
    answer: float = option(256, "Mean number of tokens of an answer.", min=1)
    fail: list[str] | None = option(None, "Failure kill, hang, partition or slow, such as kill:1@5+10.")
    autoscale: bool = flag("Add and remove nodes by the ratio formula; needs long --seconds.")
    boot_s: float | None = option(None, "Seconds until an added node drafts. Default: 60.", min=0)
    run_ahead: bool = option(True, "Draft on while targets verify.")
    waiting: str = option("worth", "Levels to wait for: worth, all or none.", metavar="worth|all|none")
    seconds: float = option(20.0, "Simulated seconds; the first tenth is warm-up.", min=0.1)
    seed: int = option(0, "Random seed; the same seed gives the same events.", min=0)

    def __post_init__(self) -> None:
        one_of("--waiting", self.waiting, WAITING)
        if self.boot_s is not None and not self.autoscale:
            raise RequestError("--boot-s is for nodes that are added: give --autoscale too, or leave it out")

    def scenario(self, fleet: FleetOptions, calibration: "Calibration") -> "Scenario":
        from foreword.simulate.scenario import (
            Autoscale,
            Failure,
            FleetSize,
            HourlyPrices,
            Scenario,
            Traffic,
            WaitRule,
        )

        scaling = Autoscale() if self.boot_s is None else Autoscale(self.boot_s)
        return Scenario(
            FleetSize(fleet.targets, fleet.nodes, fleet.zones, fleet.batch),
            calibration.network,
            Traffic(_rates(self.rate), self.prompt, self.answer),
            HourlyPrices(fleet.target_price, fleet.node_price),
            calibration.costs,
            calibration.kinds,
            waiting=WaitRule(self.waiting),
            runs_ahead=self.run_ahead,
            k=self.k,
            failures=tuple(Failure.parse(text) for text in self.fail or ()),
            autoscale=scaling if self.autoscale else None,
            seconds=self.seconds,
            seed=self.seed,
        )


@options_command
def simulate(
    *,
    fleet: FleetOptions,
    costs: CostOptions,
    load: LoadOptions,
    goals: GoalOptions,
    page: Annotated[Path | None, typer.Option(help="Vary the sizes and write this HTML file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a fleet of targets and draft nodes: tokens per second, latency and cost, also while nodes fail.

    Compares plain decoding, drafting on the targets, draft nodes, and draft nodes without running ahead, on the same
    traffic. Measure first, then simulate:

    foreword bench step --tokens 1,2,4,8,16,32,64 --json > step.json

    foreword bench drafters --methods suffix,self_quantized --json > drafters.json

    foreword bench link --json > link.json

    foreword simulate --step step.json --drafters drafters.json --link link.json --targets 64 --nodes 8

    Without these files the costs are illustrative: typical of a large target, not measured. Options by question: how
    many machines (--goal-tokens-per-second, --goal-p95-ms), distance (--network-ms, --zones), failures (--fail
    kill:1@5+10), cost (--target-price, --node-price). docs/simulate.md describes the model.
    """
    _check_numbers(fleet, costs, load, goals)
    if costs.zone_ms is not None and fleet.zones == 1:
        raise RequestError("--zone-ms is the way between zones, and there is one: give --zones 2 or more too")
    goals.check(page, load.autoscale)
    if page is not None and not page.parent.is_dir():
        raise RequestError(f"--page {page} cannot be written: there is no directory {page.parent}")
    calibration = costs.calibration()
    scenario = load.scenario(fleet, calibration)
    goal = goals.goal()
    if goal is not None:
        found = search_goal(scenario, goal, goals.goal_vary, goals.goal_most)
        _print_lines(_notes(calibration, scenario))
    else:
        found = _compared(calibration, scenario, page)
    if as_json:
        given = {"made": provenance(), "scenario": asdict(scenario), "assumed": calibration.assumed}
        print_json({**given, "measured": calibration.measured, **found})
    if goal is not None and not any(answer["fleet"] for answer in found["answers"]):
        raise typer.Exit(1)


def _check_numbers(*groups: FleetOptions | CostOptions | LoadOptions | GoalOptions) -> None:
    """Raise `RequestError` for NaN and infinity, which typer accepts."""
    for group in groups:
        for name, value in asdict(group).items():
            if isinstance(value, float) and not isfinite(value):
                raise RequestError(f"--{name.replace('_', '-')} must be a number, not {value:g}")


def _compared(calibration: "Calibration", scenario: "Scenario", page: Path | None) -> dict[str, Any]:
    """Simulate the four ways of drafting, print them, and return them for --json."""
    from foreword.bench.skeleton import optional, table
    from foreword.simulate.sweep import compare_drafting

    with stage_bar() as on_stage:
        compared = compare_drafting(scenario, on_stage)
    notes = _notes(calibration, scenario, compared)
    plain = compared["plain"].tokens_per_second
    columns: dict[str, Column] = {
        "drafting": "{0[0]}",
        "tok/s": "{0[1].tokens_per_second:.0f}",
        "x plain": lambda one: f"{one[1].tokens_per_second / plain:.2f}" if plain else "-",
        "tok per\npass": lambda one: optional(one[1].tokens_per_pass, ".2f"),
        "ms/tok\np50": lambda one: optional(one[1].token_ms_p50, ".2f"),
        "\np95": lambda one: optional(one[1].token_ms_p95, ".2f"),
        "wait": "{0[1].waiting_share:.0%}",
        "nodes\nbusy": lambda one: optional(one[1].node_busy_share, ".0%"),
        "cost per\nmillion": lambda one: optional(one[1].cost_per_million, ".3g"),
    }
    stdout.print(table(compared.items(), columns))
    _print_lines(notes)
    points = [] if page is None else _write_page(page, scenario, compared, notes)
    return {"ways": {who: asdict(outcome) for who, outcome in compared.items()}, "sweep": points}


def _print_lines(lines: list[str]) -> None:
    for line in lines:
        stdout.print(line, markup=False, soft_wrap=True)


def _rates(text: str | None) -> tuple[float, ...]:
    try:
        return () if text is None else tuple(float(part) for part in text.split(","))
    except ValueError:
        raise RequestError(f"--rate takes requests per second, numbers with commas, not {text!r}") from None


def _notes(
    calibration: "Calibration", scenario: "Scenario", compared: "Mapping[str, SimulationResult] | None" = None
) -> list[str]:
    from foreword.simulate.report import scaling_summary

    lines = [f"measured: {what} ({file})" for what, file in calibration.measured.items()]
    if calibration.assumed:
        lines.append(f"illustrative, not measured: {'; '.join(calibration.assumed)}")
    most, rows = scenario.costs.passes.most_measured, scenario.fleet.batch * (scenario.k + 1)
    if "steps" in calibration.measured and rows > most:
        lines.append(f"passes of up to {rows} tokens are extrapolated from those measured, up to {most}")
    if compared is not None and "remote" not in compared:
        lines.append("--nodes 0: only plain decoding and drafting on the targets are compared")
    elif compared is not None and scenario.autoscale is not None:
        lines.append(scaling_summary(scenario, compared["remote"]))
    without = [who for who, one in (compared or {}).items() if not one.tokens]
    if without:
        lines.append(f"no tokens in the time that counts ({', '.join(without)}): simulate more --seconds")
    lines.append(
        f"{scenario.seconds:g} s simulated, seed {scenario.seed}; "
        f"an hour costs {scenario.prices.target:g} for a target, {scenario.prices.node:g} for a node"
    )
    return lines


def _write_page(
    path: Path, scenario: "Scenario", compared: "Mapping[str, SimulationResult]", notes: list[str]
) -> list[dict[str, Any]]:
    from foreword.simulate.report import simulation_page
    from foreword.simulate.sweep import axes_of, sweep

    with stage_bar() as on_stage:
        points = sweep(scenario, axes_of(scenario), on_stage)
    try:
        path.write_text(simulation_page(scenario, compared, points, notes), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"--page {path} cannot be written: {error.strerror}") from None
    stdout.print(f"page: {path}", markup=False, soft_wrap=True)
    return [asdict(point) for point in points]
