"""`foreword prove --pair`: how far a draft model is from its target."""

from dataclasses import asdict
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from foreword.cli.console import print_json, stage_bar, stdout

if TYPE_CHECKING:
    from foreword.bench.skeleton import Column

PROMPTS_PER_KIND = 1
FULL_PROMPTS_PER_KIND = 4

_DIVERGENCE: "dict[str, Column]" = {
    "kind": "{.kind}",
    "T": "{.temperature:g}",
    "places": "{.found.places}",
    "TV": "{.found.tv:.3f}",
    "KL": lambda row: "" if row.found.kl is None else f"{row.found.kl:.3f}",
    "same top": "{.found.same_top:.0%}",
    "token": "{.found.token:.0%}",
    "coupled": "{.found.coupled:.0%}",
    "chosen": "{.found.chosen:.0%}",
}
_RULES: "dict[str, Column]" = {
    "kind": "{.kind}",
    "T": "{.temperature:g}",
    "rule": "{.rule}",
    "accepted up to position 1, 2, …": lambda run: " ".join(f"{share:.0%}" for share in run.per_position),
    "tokens per pass": "{.tokens_per_pass:.2f}",
}
_EXPECTED: "dict[str, Column]" = {
    "T": "{.temperature:g}",
    "rule": "{.rule}",
    "draft tokens": "{.k}",
    "tokens per pass": "{.tokens_per_pass:.2f}",
    "cost in plain passes": "{.cost:.2f}",
    "speed-up": "{.speedup:.2f}",
}


def prove_pair(target: str, draft: str, *, full: bool, as_json: bool) -> None:
    """Measure a pair, and print the speed-up to expect on this machine."""
    from foreword.bench.pair import PairBench, PairSettings, expectations, merged
    from foreword.bench.prompts import own_prompts, take_per_category
    from foreword.bench.skeleton import table
    from foreword.engine.loader import load_model
    from foreword.models.sources.resolve import resolve_model

    settings = PairSettings(max_tokens=128 if full else 48)
    prompts = take_per_category(own_prompts(), FULL_PROMPTS_PER_KIND if full else PROMPTS_PER_KIND)
    with stage_bar(is_long=True) as show:
        paths = [str(resolve_model(name, on_progress=show)) for name in (target, draft)]
        loaded = [load_model(path, progress=partial(show, "loading")) for path in paths]
        bench = PairBench(loaded[0], loaded[1], paths[1], settings)
        divergences, runs = bench.run(prompts, show)
    expected, by_kind = expectations(runs, settings.guesses), merged(runs, by_kind=True)
    stdout.print(table(divergences, _DIVERGENCE, f"{draft} for {target}: distributions of the next token"))
    drafted = sorted((run for run in by_kind if run.drafts), key=lambda run: (run.kind, run.temperature))
    stdout.print(table(drafted, _RULES, "in the engine"))
    groups = groupby(expected, key=lambda row: (row.temperature, row.rule))
    best = [max(found, key=lambda row: row.speedup) for _, found in groups]
    stdout.print(table(best, _EXPECTED, "best number of draft tokens, by the times of this machine"))
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
                    for run in by_kind
                ],
                "expected": [asdict(row) for row in expected],
            }
        )
