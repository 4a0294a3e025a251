"""What the documentation site makes of the repository: tables of the benchmarks' JSON."""

import json
import re
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parent / "benchmarks"
MARK = "<!-- benchmarks -->"
_SOURCE_LINK = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")


def on_page_markdown(markdown: str, **_: Any) -> str:  # noqa: ANN401 - mkdocs' own types
    """mkdocs calls this with every page. Links into the source tree, which the site has not, become plain text."""
    markdown = _SOURCE_LINK.sub(r"\1", markdown)
    return markdown.replace(MARK, benchmark_tables(BENCHMARKS)) if MARK in markdown else markdown


def benchmark_tables(folder: Path) -> str:
    """A section for every file: what made it, when and where, its rows, and the plot of the same name."""
    sections = []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        made = found["made"]
        head = f"## {path.stem.replace('-', ' ')}\n\n`{made['command']}`, {made['date']}, {made['machine']}"
        plot = path.with_suffix(".png")
        picture = f"\n\n![{path.stem}](benchmarks/{plot.name})" if plot.exists() else ""
        sections.append(f"{head}\n\n{_table(found['rows'])}{picture}")
    return "\n\n".join(sections)


def _table(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0])
    lines = ["| " + " | ".join(name.replace("_", " ") for name in names) + " |", "| --- " * len(names) + "|"]
    lines += ["| " + " | ".join(_cell(row.get(name)) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:  # noqa: ANN401 - any JSON
    if value is None:
        return ""
    if isinstance(value, dict):  # an interval
        return f"{value['middle']:.2f} ({value['low']:.2f} to {value['high']:.2f})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
