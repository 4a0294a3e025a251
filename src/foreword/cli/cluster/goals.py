"""`foreword simulate --goal-...`: the smallest fleet that reaches a throughput and a latency."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreword.cli.console import stage_bar, stdout
from foreword.cli.options.common import one_of
from foreword.cli.options.grouped import option
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.bench.skeleton import Column
    from foreword.simulate.scenario import Scenario
    from foreword.simulate.sweep import Goal, SmallestFleet

VARIED = ("targets", "nodes")


@dataclass(frozen=True)
class GoalOptions:
    """Goals of the fleet search."""

    goal_tokens_per_second: float | None = option(None, "Find the smallest fleet with this rate.", min=0.001)
    goal_p95_ms: float | None = option(None, "Find the smallest fleet with this p95 in ms.", min=0.001)
    goal_vary: str | None = option(None, "Machines to vary. Default: both.", metavar="targets|nodes")
    goal_most: int | None = option(None, "Largest number that the search tries. Default: 128.", min=1)

    def goal(self) -> "Goal | None":
        from foreword.simulate.sweep import Goal

        given = (self.goal_tokens_per_second, self.goal_p95_ms)
        return None if given == (None, None) else Goal(*given)

    def check(self, page: Path | None, autoscale: bool) -> None:
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


def search_goal(scenario: "Scenario", goal: "Goal", vary: str | None, most: int | None) -> dict[str, Any]:
    """Search, print trials and answers, and return both for --json."""
    from foreword.bench.skeleton import optional, table
    from foreword.simulate.sweep import Vary, find_fleets

    with stage_bar() as on_stage:
        trials, answers = find_fleets(scenario, goal, Vary(vary or "targets"), most or 128, on_stage)
    columns: dict[str, Column] = {
        "drafting": "{.who}",
        "targets": "{.targets}",
        "nodes": "{.nodes}",
        "tok/s": "{.tokens_per_second:.0f}",
        "ms/tok\np95": lambda one: optional(one.token_ms_p95, ".2f"),
        "cost per\nhour": "{.cost_per_hour:g}",
        "goal": lambda one: "missed" if one.missed else "reached",
    }
    stdout.print(table(trials, columns))
    for line in answer_lines(answers):
        stdout.print(line, markup=False, soft_wrap=True)
    return {"goal": asdict(goal), "trials": list(map(asdict, trials)), "answers": list(map(asdict, answers))}


def answer_lines(answers: "Sequence[SmallestFleet]") -> list[str]:
    """Return one line per way of drafting, with the cheapest marked."""
    costs = [one.fleet.cost_per_hour for one in answers if one.fleet is not None]
    lines = []
    for one in answers:
        if one.fleet is None:
            lines.append(f"{one.who}: not reached: {one.why_not}")
            continue
        nodes = f" and {_counted(one.fleet.nodes, 'draft node')}" if one.fleet.nodes else ""
        cheapest = ", the cheapest" if len(answers) > 1 and one.fleet.cost_per_hour == min(costs) else ""
        cost = f"{one.fleet.cost_per_hour:g} an hour{cheapest}"
        lines.append(f"{one.who}: {_counted(one.fleet.targets, 'target')}{nodes}, {cost}")
    return lines


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"
