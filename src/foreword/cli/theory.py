"""`foreword theory`: expected speed-up of speculation from acceptance and costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from foreword.bench import theory as formulas
from foreword.bench.pictures import Chart, save_charts
from foreword.bench.skeleton import optional
from foreword.cli.console import fields_of, say, stdout
from foreword.cli.options.common import JsonCommand, parse_sizes, plot_option, save_plot
from foreword.cli.options.grouped import command, option
from foreword.errors import RequestError

MOST_DRAFT_TOKENS = 1000  # upper limit, far beyond any pass; the closed form has none

CLOSED_FORM, MEASURED = "closed form", "measured steps"


@dataclass(frozen=True, kw_only=True)
class Theory(JsonCommand):
    """Print expected tokens per pass, speed-up, best number of draft tokens and break-even acceptance.

    Assumes that every draft token is accepted with the same probability, independently of the others (docs/theory.md).
    """

    alpha: float = option(0.8, "Acceptance rate per draft token, 0 to 1.")
    draft_cost: float = option(0.05, "Time of one draft token, or tree level, in plain target passes.")
    k: str = option("1..15", "Draft tokens per pass (depth of the draft): 1..15, or 1,2,4.")
    network_cost: float = option(0.0, "Round trip to a remote drafter, in plain target passes.")
    tree_width: int = option(1, "Alternatives at every level; all are verified, one is continued.")
    step_costs: Path | None = option(None, "Output of `foreword bench step --json`, to use its pass times.")
    plot: Path | None = plot_option()

    def run(self) -> None:
        depths = parse_depths(self.k)
        curves = {CLOSED_FORM: formulas.FLAT}
        if self.step_costs is not None:
            curves[MEASURED] = formulas.read_step_costs(self.step_costs)
        drafting = formulas.DraftingCost(self.draft_cost, self.network_cost, self.tree_width)
        by_curve = {
            name: formulas.predict(self.alpha, drafting, depths, curve) for name, curve in curves.items()
        }
        unit = "draft token" if self.tree_width == 1 else f"level of {self.tree_width} draft tokens"
        trip = f", a round trip {self.network_cost:g}" if self.network_cost else ""
        title = f"acceptance {self.alpha:g}, one {unit} costs {self.draft_cost:g} passes{trip}"
        stdout.print(title)
        stdout.print(_table(by_curve))
        results = {name.replace(" ", "_"): _summary(predictions) for name, predictions in by_curve.items()}
        say(*map(_verdict, by_curve, results.values()))
        save_plot(self.plot, lambda path: _plot(by_curve, path, title))
        given = {name: getattr(self, name) for name in ("alpha", "draft_cost", "network_cost", "tree_width")}
        self.show_json({**given, **results})


theory = command(Theory)


def parse_depths(text: str) -> list[int]:
    """Parse `1..15`, `4` or `1,2,4,8`, in rising order."""
    first, dots, last = text.partition("..")
    if not dots:
        depths = sorted(set(parse_sizes("--k", text)))
    elif first.strip().isdecimal() and last.strip().isdecimal():
        depths = list(range(int(first), min(int(last), MOST_DRAFT_TOKENS + 1) + 1))
    else:
        raise RequestError(f"--k takes a range such as 1..15 or numbers separated by commas, not {text!r}")
    if not depths or depths[0] < 1 or depths[-1] > MOST_DRAFT_TOKENS:
        raise RequestError(f"--k must name numbers of draft tokens in 1 .. {MOST_DRAFT_TOKENS}, not {text!r}")
    return depths


def _table(by_curve: Mapping[str, Sequence[formulas.Prediction]]) -> Table:
    """Return a table with a line per number of draft tokens; the best speed-up by each step-cost curve is bold."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("k", "tokens\nper pass"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in by_curve:
        table.add_column(f"{name}:\nspeed-up", justify="right", no_wrap=True)
        table.add_column("\nbreak-even", justify="right", no_wrap=True)
    peaks = {name: formulas.best(predictions).k for name, predictions in by_curve.items()}
    for row in zip(*by_curve.values(), strict=True):
        cells = []
        for name, prediction in zip(by_curve, row, strict=True):
            speedup = f"{prediction.speedup:.2f}"
            cells.append(f"[bold]{speedup}[/bold]" if prediction.k == peaks[name] else speedup)
            cells.append(optional(prediction.break_even, ".3f", "never"))
        table.add_row(str(row[0].k), f"{row[0].tokens_per_pass:.2f}", *cells)
    return table


def _verdict(name: str, summary: Mapping[str, Any]) -> str:
    """Return one line about the `_summary` of the predictions by the step-cost curve `name`."""
    speedup = f"{summary['best_speedup']:.2f}× plain decoding"
    gain = f"best k is {summary['best_k']}, {speedup}"
    if summary["best_speedup"] <= 1:
        gain = f"no k is faster; the best, {summary['best_k']}, reaches {speedup}"
    if summary["break_even"] is None:
        return f"{name}: {gain}; no acceptance breaks even"
    least = f"acceptance {summary['break_even']:.3f} on, with k = {summary['break_even_k']}"
    return f"{name}: {gain}; breaks even from {least}"


def _summary(predictions: Sequence[formulas.Prediction]) -> dict[str, Any]:
    """Return best number of draft tokens, break-even acceptance and all predictions as JSON."""
    top, least = formulas.best(predictions), formulas.least_break_even(predictions)
    return {
        "best_k": top.k,
        "best_speedup": top.speedup,
        "break_even": None if least is None else least.break_even,
        "break_even_k": None if least is None else least.k,
        "rows": fields_of(predictions),
    }


def _plot(by_curve: Mapping[str, Sequence[formulas.Prediction]], path: Path, title: str) -> None:
    tokens = {"": [(one.k, one.tokens_per_pass) for one in by_curve[CLOSED_FORM]]}
    speedups = {name: [(one.k, one.speedup) for one in rows] for name, rows in by_curve.items()}
    limits = {
        name: [(one.k, one.break_even) for one in rows if one.break_even is not None]
        for name, rows in by_curve.items()
    }
    tops = [(top.k, top.speedup) for top in map(formulas.best, by_curve.values())]
    charts = [
        Chart("draft tokens per pass (k)", "expected tokens per pass", tokens),
        Chart("draft tokens per pass (k)", "speed-up", speedups, (1.0, "plain decoding"), tops),
        Chart("draft tokens per pass (k)", "break-even acceptance", limits),
    ]
    save_charts(charts, path, title)
