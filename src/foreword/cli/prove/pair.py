"""`foreword prove --pair`: how far a draft model is from its target."""

from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

from rich.table import Table

from foreword.cli.console import print_json, stage_bar, stdout

if TYPE_CHECKING:
    from foreword.bench.pair import Expectation, KindDivergence, RuleRun

PROMPTS_PER_KIND = 1
FULL_PROMPTS_PER_KIND = 4


def prove_pair(target: str, draft: str, *, full: bool, as_json: bool) -> None:
    """Measure a pair, and print the speed-up to expect on this machine."""
    from foreword.bench.pair import PairBench, PairSettings, expectations, merged
    from foreword.bench.prompts import own_prompts, take_per_category
    from foreword.engine.loader import load_model
    from foreword.models.sources.resolve import resolve_model

    settings = PairSettings(max_tokens=128 if full else 48)
    prompts = take_per_category(own_prompts(), FULL_PROMPTS_PER_KIND if full else PROMPTS_PER_KIND)
    with stage_bar(is_long=True) as show:
        paths = [str(resolve_model(name, on_progress=show)) for name in (target, draft)]
        loaded = [load_model(path, progress=lambda a, b: show("loading", a, b)) for path in paths]
        bench = PairBench(loaded[0], loaded[1], paths[1], settings)
        divergences, runs = bench.run(prompts, show)
    expected = expectations(runs, settings.guesses)
    stdout.print(_divergence_table(divergences, f"{draft} for {target}: distributions of the next token"))
    stdout.print(_rule_table(merged(runs, by_kind=True)))
    stdout.print(_expectation_table(expected))
    if as_json:
        print_json(
            {
                "target": target,
                "draft": draft,
                **asdict(settings),
                "prompts": len(prompts),
                "divergences": [
                    {"kind": row.kind, "temperature": row.temperature, **asdict(row.found)}
                    for row in divergences
                ],
                "acceptance": [
                    {**asdict(run), "per_position": run.per_position, "tokens_per_pass": run.tokens_per_pass}
                    for run in merged(runs, by_kind=True)
                ],
                "expected": [asdict(row) for row in expected],
            }
        )


def _divergence_table(rows: "list[KindDivergence]", title: str) -> Table:
    table = Table("kind", "T", "places", "TV", "KL", "same top", "token", "coupled", "chosen", title=title)
    for row in rows:
        found = row.found
        shares = (found.same_top, found.token, found.coupled, found.chosen)
        kl = "" if found.kl is None else f"{found.kl:.3f}"
        reported = [f"{share:.0%}" for share in shares]
        table.add_row(row.kind, f"{row.temperature:g}", str(found.places), f"{found.tv:.3f}", kl, *reported)
    return table


def _rule_table(runs: "list[RuleRun]") -> Table:
    table = Table(
        "kind", "T", "rule", "accepted up to position 1, 2, …", "tokens per pass", title="in the engine"
    )
    for run in sorted(runs, key=lambda run: (run.kind, run.temperature)):
        if run.drafts:
            shares = " ".join(f"{share:.0%}" for share in run.per_position)
            table.add_row(run.kind, f"{run.temperature:g}", run.rule, shares, f"{run.tokens_per_pass:.2f}")
    return table


def _expectation_table(rows: "list[Expectation]") -> Table:
    title = "best number of draft tokens, by the times of this machine"
    table = Table(
        "T", "rule", "draft tokens", "tokens per pass", "cost in plain passes", "speed-up", title=title
    )
    for (temperature, rule), found in groupby(rows, key=lambda row: (row.temperature, row.rule)):
        best = max(found, key=lambda row: row.speedup)
        reported = f"{best.tokens_per_pass:.2f}", f"{best.cost:.2f}", f"{best.speedup:.2f}"
        table.add_row(f"{temperature:g}", rule, str(best.k), *reported)
    return table
