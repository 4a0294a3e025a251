"""`foreword simulate`: discrete-event simulation of targets and draft nodes."""

from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foreword.cli.bench.common import provenance
from foreword.cli.console import print_json
from foreword.cli.options.common import JsonOption, check_output, one_of
from foreword.cli.options.grouped import flag, option, options_command, pick
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.simulate.calibration import Calibration
    from foreword.simulate.scenario import Scenario
    from foreword.simulate.sweep import Goal

WAITING = ("worth", "all", "none")
VARIED = ("targets", "nodes")


@dataclass(frozen=True)
class FleetOptions:
    """Numbers of machines, their zones and prices."""

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

        measured = calibrate(self.step, self.drafters, self.link, self.method)
        costs, network = measured.costs, measured.network
        if self.zone_ms is not None:
            network = replace(network, zone_round_trip=self.zone_ms / 1e3)
        if self.network_ms is not None:
            network = replace(network, round_trip=self.network_ms / 1e3)
        if self.pass_ms is not None:
            factor = self.pass_ms / 1e3 / costs.passes.seconds(1)
            times = tuple((rows, seconds * factor) for rows, seconds in costs.passes.points)
            costs = replace(costs, passes=PassTimes(times))
        if self.level_ms is not None:
            level = self.level_ms / 1e3
            costs = replace(costs, local=costs.local.scaled(level), node=costs.node.scaled(level))
        kinds = measured.kinds
        if self.alpha is not None or not kinds:
            kinds = (AcceptanceCurve.of_rate(0.8 if self.alpha is None else self.alpha),)
        return replace(measured, costs=costs, network=network, kinds=kinds)


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
        """Return the scenario of these options, of this fleet, with these costs."""
        from foreword.simulate import scenario

        scaling = scenario.Autoscale() if self.boot_s is None else scenario.Autoscale(self.boot_s)
        return pick(
            scenario.Scenario,
            self,
            fleet=pick(scenario.FleetSize, fleet),
            network=calibration.network,
            traffic=pick(scenario.Traffic, self, rates=_rates(self.rate)),
            prices=scenario.HourlyPrices(fleet.target_price, fleet.node_price),
            costs=calibration.costs,
            kinds=calibration.kinds,
            waiting=scenario.WaitRule(self.waiting),
            runs_ahead=self.run_ahead,
            failures=tuple(map(scenario.Failure.parse, self.fail or ())),
            autoscale=scaling if self.autoscale else None,
        )


def _rates(text: str | None) -> tuple[float, ...]:
    """Parse the rates of `--rate`; empty without the option."""
    try:
        return () if text is None else tuple(float(part) for part in text.split(","))
    except ValueError:
        raise RequestError(f"--rate takes requests per second, numbers with commas, not {text!r}") from None


@dataclass(frozen=True)
class GoalOptions:
    """Goals of the fleet search."""

    goal_tokens_per_second: float | None = option(None, "Find the smallest fleet with this rate.", min=0.001)
    goal_p95_ms: float | None = option(None, "Find the smallest fleet with this p95 in ms.", min=0.001)
    goal_vary: str | None = option(None, "Machines to vary. Default: both.", metavar="targets|nodes")
    goal_most: int | None = option(None, "Largest number that the search tries. Default: 128.", min=1)

    def goal(self) -> "Goal | None":
        """Return the goal; None: simulate one fleet."""
        from foreword.simulate.sweep import Goal

        limits = (self.goal_tokens_per_second, self.goal_p95_ms)
        return None if limits == (None, None) else Goal(*limits)

    def check(self, page: Path | None, autoscale: bool) -> None:
        """Raise `RequestError` for options that exclude or need a goal."""
        has_goal = self.goal() is not None
        if self.goal_vary is not None:
            one_of("--goal-vary", self.goal_vary, VARIED)
        if not has_goal and (self.goal_vary is not None or self.goal_most is not None):
            name = "--goal-vary" if self.goal_vary is not None else "--goal-most"
            raise RequestError(f"{name} needs a goal: give --goal-tokens-per-second or --goal-p95-ms")
        if has_goal and page is not None:
            raise RequestError("--page shows one fleet, and a goal searches for one: leave one of them out")
        if has_goal and autoscale:
            raise RequestError(
                "--autoscale changes the number of nodes, as a goal does: leave one of them out"
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
    if page is not None:
        check_output("--page", page)
    from foreword.cli.cluster.simulated import compare, search

    calibration = costs.calibration()
    scenario = load.scenario(fleet, calibration)
    goal = goals.goal()
    if goal is not None:
        results = search(calibration, scenario, goal, goals.goal_vary, goals.goal_most)
    else:
        results = compare(calibration, scenario, page)
    if as_json:
        origin = {"made": provenance(), "scenario": asdict(scenario), "assumed": calibration.assumed}
        print_json({**origin, "measured": calibration.measured, **results})
    if goal is not None and not any(answer["fleet"] for answer in results["answers"]):
        raise typer.Exit(1)


def _check_numbers(*groups: FleetOptions | CostOptions | LoadOptions | GoalOptions) -> None:
    """Raise `RequestError` for NaN and infinity, which typer accepts."""
    for group in groups:
        for name, value in asdict(group).items():
            if isinstance(value, float) and not isfinite(value):
                raise RequestError(f"--{name.replace('_', '-')} must be a number, not {value:g}")
