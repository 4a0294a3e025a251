"""`foreword theory`: expected speed-up of speculation from acceptance and costs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from foreword.cli.console import JsonOption, PlotOption, parse_sizes, print_json, stdout
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.bench.theory import Prediction

MOST_GUESSES = 1000
"""Far beyond what a pass can hold; the closed form has no bound of its own."""

CLOSED_FORM, MEASURED = "closed form", "measured steps"


def theory(
    alpha: Annotated[float, typer.Option(help="Acceptance rate per draft token, 0 to 1.")] = 0.8,
    draft_cost: Annotated[
        float,
        typer.Option(help="Time of one draft token, or of one level of a tree, in plain target passes."),
    ] = 0.05,
    k: Annotated[
        str, typer.Option(help="Draft tokens per pass (depth of the draft): 1..15, or 1,2,4.")
    ] = "1..15",
    network_cost: Annotated[
        float,
        typer.Option(help="Round trip to a remote drafter, in plain target passes; once per draft."),
    ] = 0.0,
    tree_width: Annotated[
        int, typer.Option(help="Alternatives at every level; all are verified, one is continued.")
    ] = 1,
    step_costs: Annotated[
        Path | None, typer.Option(help="Output of `foreword bench step --json`: also use these pass times.")
    ] = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print expected tokens per pass, speed-up, best number of draft tokens and break-even acceptance.

    Assumes that every draft token is accepted with the same probability, independently of the others (docs/theory.md).
    """
    from foreword.bench.theory import FLAT, DraftingCost, predict, read_step_costs

    depths = parse_depths(k)
    curves = {CLOSED_FORM: FLAT}
    if step_costs is not None:
        curves[MEASURED] = read_step_costs(step_costs)
    drafting = DraftingCost(draft_cost, network_cost, tree_width)
    found = {name: predict(alpha, drafting, depths, curve) for name, curve in curves.items()}
    title = f"acceptance {alpha:g}, one draft token costs {draft_cost:g} passes"
    if tree_width > 1:
        title = f"acceptance {alpha:g}, one level of {tree_width} draft tokens costs {draft_cost:g} passes"
    if network_cost:
        title += f", a round trip {network_cost:g}"
    stdout.print(title)
    stdout.print(_table(found))
    for name, predictions in found.items():
        stdout.print(_verdict(name, predictions), soft_wrap=True)
    if plot is not None:
        _plot(found, plot, title)
        stdout.print(f"plot: {plot}", markup=False, soft_wrap=True)
    if as_json:
        results = {name.replace(" ", "_"): _summary(predictions) for name, predictions in found.items()}
        given = {"draft_cost": draft_cost, "network_cost": network_cost, "tree_width": tree_width}
        print_json({"alpha": alpha, **given, **results})


def parse_depths(text: str) -> list[int]:
    """`1..15`, `4` or `1,2,4,8`, in rising order."""
    first, dots, last = text.partition("..")
    if not dots:
        depths = sorted(set(parse_sizes("--k", text)))
    elif first.strip().isdecimal() and last.strip().isdecimal():
        depths = list(range(int(first), min(int(last), MOST_GUESSES + 1) + 1))
    else:
        raise RequestError(f"--k takes a range such as 1..15 or numbers separated by commas, not {text!r}")
    if not depths or depths[0] < 1 or depths[-1] > MOST_GUESSES:
        raise RequestError(f"--k must name numbers of draft tokens in 1 .. {MOST_GUESSES}, not {text!r}")
    return depths


def _table(found: "Mapping[str, Sequence[Prediction]]") -> Table:
    from foreword.bench.theory import best

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("k", "tokens\nper pass"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in found:
        table.add_column(f"{name}:\nspeed-up", justify="right", no_wrap=True)
        table.add_column("\nbreak-even", justify="right", no_wrap=True)
    peaks = {name: best(predictions).k for name, predictions in found.items()}
    for row in zip(*found.values(), strict=True):
        cells = []
        for name, one in zip(found, row, strict=True):
            speedup = f"{one.speedup:.2f}"
            cells.append(f"[bold]{speedup}[/bold]" if one.k == peaks[name] else speedup)
            cells.append("never" if one.break_even is None else f"{one.break_even:.3f}")
        table.add_row(str(row[0].k), f"{row[0].tokens_per_pass:.2f}", *cells)
    return table


def _verdict(name: str, predictions: "Sequence[Prediction]") -> str:
    from foreword.bench.theory import best, least_break_even

    top, least = best(predictions), least_break_even(predictions)
    if top.speedup > 1:
        gain = f"best k is {top.k}, {top.speedup:.2f}× plain decoding"
    else:
        gain = f"no k is faster; the best, {top.k}, reaches {top.speedup:.2f}× plain decoding"
    if least is None:
        return f"{name}: {gain}; no acceptance breaks even"
    return f"{name}: {gain}; breaks even from acceptance {least.break_even:.3f} on, with k = {least.k}"


def _summary(predictions: "Sequence[Prediction]") -> dict[str, Any]:
    from foreword.bench.theory import best, least_break_even

    top, least = best(predictions), least_break_even(predictions)
    return {
        "best_k": top.k,
        "best_speedup": top.speedup,
        "break_even": None if least is None else least.break_even,
        "break_even_k": None if least is None else least.k,
        "rows": [asdict(one) for one in predictions],
    }


def _plot(found: "Mapping[str, Sequence[Prediction]]", path: Path, title: str) -> None:
    from foreword.bench.pictures import Chart, save_charts
    from foreword.bench.theory import best

    tokens = {"": [(one.k, one.tokens_per_pass) for one in found[CLOSED_FORM]]}
    speedups = {name: [(one.k, one.speedup) for one in rows] for name, rows in found.items()}
    limits = {
        name: [(one.k, one.break_even) for one in rows if one.break_even is not None]
        for name, rows in found.items()
    }
    tops = [(top.k, top.speedup) for top in map(best, found.values())]
    charts = [
        Chart("draft tokens per pass (k)", "expected tokens per pass", tokens),
        Chart("draft tokens per pass (k)", "speed-up", speedups, (1.0, "plain decoding"), tops),
        Chart("draft tokens per pass (k)", "break-even acceptance", limits),
    ]
    save_charts(charts, path, title)
