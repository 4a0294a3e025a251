"""Runs and prints `foreword simulate`: a comparison of ways of drafting, or the smallest fleet for a goal."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from foreword.bench.skeleton import Column, optional
from foreword.cli.console import fields_of, print_table, say, stage_bar
from foreword.errors import RequestError
from foreword.simulate.calibration import Calibration
from foreword.simulate.report import scaling_summary, simulation_page
from foreword.simulate.scenario import Scenario
from foreword.simulate.sweep import Goal, SmallestFleet, Vary, axes_of, compare_drafting, find_fleets, sweep
from foreword.simulate.world import SimulationResult


def compare(calibration: Calibration, scenario: Scenario, page: Path | None) -> dict[str, Any]:
    """Simulate all ways of drafting, print them and write the page; return the results for --json."""
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
    print_table(list(compared.items()), columns)
    say(*notes)
    points = [] if page is None else _write_page(page, scenario, compared, notes)
    return {"ways": {who: asdict(outcome) for who, outcome in compared.items()}, "sweep": points}


def _notes(
    calibration: Calibration, scenario: Scenario, compared: Mapping[str, SimulationResult] | None = None
) -> list[str]:
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
    path: Path, scenario: Scenario, compared: Mapping[str, SimulationResult], notes: list[str]
) -> list[dict[str, Any]]:
    with stage_bar() as on_stage:
        points = sweep(scenario, axes_of(scenario), on_stage)
    try:
        path.write_text(simulation_page(scenario, compared, points, notes), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"--page {path} cannot be written: {error.strerror}") from None
    say(f"page: {path}")
    return fields_of(points)


def search(
    calibration: Calibration, scenario: Scenario, goal: Goal, vary: str | None, most: int | None
) -> dict[str, Any]:
    """Find the smallest fleets, and print all fleets that were tried; return both for --json."""
    with stage_bar() as on_stage:
        trials, answers = find_fleets(scenario, goal, Vary(vary or "targets"), most or 128, on_stage)
    print_table(trials)
    say(*answer_lines(answers), *_notes(calibration, scenario))
    return {"goal": asdict(goal), "trials": fields_of(trials), "answers": fields_of(answers)}


def answer_lines(answers: Sequence[SmallestFleet]) -> list[str]:
    """Return one line per way of drafting, with the cheapest marked."""
    costs = [answer.fleet.cost_per_hour for answer in answers if answer.fleet is not None]
    lines = []
    for answer in answers:
        fleet = answer.fleet
        if fleet is None:
            lines.append(f"{answer.who}: not reached: {answer.why_not}")
            continue
        nodes = f" and {_counted(fleet.nodes, 'draft node')}" if fleet.nodes else ""
        cheapest = ", the cheapest" if len(answers) > 1 and fleet.cost_per_hour == min(costs) else ""
        cost = f"{fleet.cost_per_hour:g} an hour{cheapest}"
        lines.append(f"{answer.who}: {_counted(fleet.targets, 'target')}{nodes}, {cost}")
    return lines


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"
