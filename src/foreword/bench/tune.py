"""Derives a policy file from measurements."""

import re
from collections.abc import Mapping, Sequence
from glob import escape
from itertools import chain, count
from typing import Any

from foreword.bench.drafters.summary import ALL, DrafterRow
from foreword.bench.methods import Method
from foreword.control.policy_file.document import OTHER

WORTH_TRYING = 0.95
"""Minimum speed-up, drafting at every step, of a drafter to keep."""

MOST_DRAFTERS = 3
"""Maximum drafters per cohort."""

EVERYTHING_ELSE = "rest"

WRITTEN_BY = "foreword tune"


def recommend(
    rows: Sequence[DrafterRow], methods: Sequence[Method], made_with: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a policy file with the best drafters per category, best first.

    The controller chooses among them at run time.
    """
    names = _names([method.label for method in methods], ())
    configs = {names[method.label]: method.config for method in methods if method.config is not None}
    kinds = list(dict.fromkeys(row.category for row in rows if row.category != ALL))
    chosen = {kind: _worth(rows, kind) for kind in kinds}
    general = _worth(rows, ALL)
    used = {names[row.drafter] for found in (*chosen.values(), general) for row in found}
    called = _names(kinds, (OTHER, EVERYTHING_ELSE))
    cohorts = [_cohort(called[kind], kind, chosen[kind], names) for kind in kinds]
    return {
        "version": 1,
        "defaults": {"state": "on"},
        "drafters": {name: config for name, config in configs.items() if name in used},
        "cohorts": [*cohorts, _cohort(EVERYTHING_ELSE, None, general, names)],
        "split": ["temperature_band"],
        "notes": {
            "by": WRITTEN_BY,
            **made_with,
            "speedup_over_plain": _table(rows),
            "left_out": _left_out(rows),
        },
    }


def _worth(rows: Sequence[DrafterRow], kind: str) -> list[DrafterRow]:
    found = [r for r in rows if r.category == kind and r.speedup >= WORTH_TRYING and not r.different_texts]
    return sorted(found, key=lambda row: -row.speedup)[:MOST_DRAFTERS]


def _cohort(
    name: str, kind: str | None, found: Sequence[DrafterRow], names: Mapping[str, str]
) -> dict[str, Any]:
    rule: dict[str, Any] = {"name": name, "match": {} if kind is None else {"metadata.task": escape(kind)}}
    return rule | ({"drafters": [names[row.drafter] for row in found]} if found else {"state": "off"})


def _table(rows: Sequence[DrafterRow]) -> dict[str, dict[str, float]]:
    table: dict[str, dict[str, float]] = {}
    for row in rows:
        table.setdefault(row.drafter, {})[row.category] = round(row.speedup, 3)
    return table


def _left_out(rows: Sequence[DrafterRow]) -> dict[str, str]:
    """Return drafters excluded because they changed texts."""
    wrong = [row for row in rows if row.category == ALL and row.different_texts]
    return {
        row.drafter: f"{row.different_texts} of {row.prompts} texts differ from plain decoding"
        for row in wrong
    }


def _names(labels: Sequence[str], taken: Sequence[str]) -> dict[str, str]:
    """Return short, unique names for a policy file."""
    names: dict[str, str] = {}
    for label in labels:
        own = re.sub(r"[^\w.+-]+", "-", label).strip("-") or "unnamed"
        numbered = (f"{own}-{number}" for number in count(2))
        free = (name for name in chain([own], numbered) if name not in taken and name not in names.values())
        names[label] = next(free)
    return names
