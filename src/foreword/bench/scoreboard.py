"""A page of results of several engines, made from the files that benchmarks wrote."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from foreword.errors import RequestError

HEAD = """# Scoreboard

Foreword beside other engines, from the result files in `docs/benchmarks/scoreboard/`.
`foreword bench scoreboard` writes this page anew.
Each table is one file: one run, or figures of a stated source. Compare rows of one table only.

- *Same text*: share of answers with the same engine's text without speculation.
- A file is the output of `foreword bench compare --json` or of `foreword prove --url --json`.
  `made` in it has the command, date and machine.
"""


def scoreboard_page(folder: Path) -> str:
    """Return the page as Markdown."""
    sections = [_section(path) for path in sorted(folder.glob("*.json"))]
    if not sections:
        raise RequestError(f"{folder} has no result files; write one with foreword bench compare --json")
    return "\n".join([HEAD, *sections])


def _section(path: Path) -> str:
    found = json.loads(path.read_text(encoding="utf-8"))
    try:
        made = found["made"]
        title = f"## {found['title'] if 'title' in found else found['model']}"
        facts = "; ".join(f"{made[name]}" for name in ("date", "machine", "load", "versions") if name in made)
        lines = [title, "", f"`{made['command']}`: {facts}. Raw data: `{path.name}`.", ""]
        lines += _verdicts(found["verdicts"]) if "verdicts" in found else _speeds(found["rows"])
    except KeyError as error:
        raise RequestError(f"{path} has no {error}; it must be what a benchmark wrote, with `made`") from None
    return "\n".join([*lines, ""])


def _speeds(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    best = max(row["tokens_per_second"] for row in rows)
    yield "| engine | tokens/s | same text | first token | memory |"
    yield "| --- | --- | --- | --- | --- |"
    for row in rows:
        speed = f"{row['tokens_per_second']:,.0f}"
        same = _optional(row.get("same_as_plain"), "{:.0%}")
        first = _optional(row.get("first_ms"), "{:.0f} ms")
        memory = _optional(row.get("peak_bytes"), "{:.0f} MiB", 2**20)
        shown = f"**{speed}**" if row["tokens_per_second"] == best else speed
        yield f"| {row['label']} | {shown} | {same} | {first} | {memory} |"


def _verdicts(verdicts: list[Mapping[str, Any]]) -> Iterator[str]:
    yield "| check | verdict |"
    yield "| --- | --- |"
    for one in verdicts:
        yield f"| {one['claim']} | {one['verdict']} |"


def _optional(value: float | None, form: str, unit: float = 1) -> str:
    return "" if value is None else form.format(value / unit)
