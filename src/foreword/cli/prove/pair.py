"""`foreword prove --pair`: distributions of a draft model and its target, acceptance, and expected speed-up."""

from dataclasses import asdict
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from foreword.bench.pair import PairBench, PairSettings, RuleAnswer, expectations, merged
from foreword.bench.prompts import own_prompts, take_per_category
from foreword.bench.skeleton import Column, optional
from foreword.cli.console import fields_of, print_table, stage_bar
from foreword.engine.loader import load_model
from foreword.models.sources.resolve import resolve_model

PROMPTS_PER_KIND = 1
FULL_PROMPTS_PER_KIND = 4

_DIVERGENCE: dict[str, Column] = {
    "kind": "{.kind}",
    "T": "{.temperature:g}",
    "places": "{.divergence.places}",
    "TV": "{.divergence.tv:.3f}",
    "KL": lambda row: optional(row.divergence.kl, ".3f", ""),
    "same top": "{.divergence.same_top:.0%}",
    "token": "{.divergence.token:.0%}",
    "coupled": "{.divergence.coupled:.0%}",
    "chosen": "{.divergence.chosen:.0%}",
}
_RULES: dict[str, Column] = {
    "kind": "{.kind}",
    "T": "{.temperature:g}",
    "rule": "{.rule}",
    "accepted up to position 1, 2, …": lambda row: " ".join(f"{share:.0%}" for share in row.run.per_position),
    "tokens per pass": "{.run.tokens_per_pass:.2f}",
}


def prove_pair(target: str, draft: str, full: bool) -> dict[str, Any]:
    """Measure, print the tables, and return them for --json."""
    settings = PairSettings(max_tokens=128 if full else 48)
    prompts = take_per_category(own_prompts(), FULL_PROMPTS_PER_KIND if full else PROMPTS_PER_KIND)
    with stage_bar(is_long=True) as show:
        paths = [str(resolve_model(name, on_progress=show)) for name in (target, draft)]
        loaded = [load_model(path, progress=partial(show, "loading")) for path in paths]
        bench = PairBench(loaded[0], loaded[1], paths[1], settings)
        divergences, runs = bench.run(prompts, show)
    expected, by_kind = expectations(runs, settings.guesses), merged(runs, by_kind=True)
    print_table(divergences, _DIVERGENCE, f"{draft} for {target}: distributions of the next token")
    drafted = [row for row in by_kind if row.run.drafted_per_position]
    print_table(sorted(drafted, key=attrgetter("kind", "temperature")), _RULES, "in the engine")
    groups = groupby(expected, attrgetter("temperature", "rule"))
    best = [max(rows, key=lambda row: row.speedup) for _, rows in groups]
    print_table(best, title="best number of draft tokens, by the times of this machine")
    return {
        "target": target,
        "draft": draft,
        **asdict(settings),
        "prompts": len(prompts),
        "divergences": [
            {"kind": row.kind, "temperature": row.temperature, **asdict(row.divergence)}
            for row in divergences
        ],
        "acceptance": list(map(_acceptance_json, by_kind)),
        "expected": fields_of(expected),
    }


def _acceptance_json(row: RuleAnswer) -> dict[str, Any]:
    names = ("tokens", "passes", "draft_seconds", "verify_seconds", "accept_seconds", "per_position")
    return {
        "rule": row.rule,
        "temperature": row.temperature,
        "kind": row.kind,
        "drafts": row.run.drafted_per_position,
        "accepted": row.run.accepted_per_position,
        **{name: getattr(row.run, name) for name in (*names, "tokens_per_pass")},
    }
