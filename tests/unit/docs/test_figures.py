"""No measured figure in README or docs without the command that makes it, the day and the machine."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

FIGURE = re.compile(r"\d\s?(?:×|ms\b|µs|us\b|tokens/s|[TG]B/s|TFLOP/s)|\d times as long")
COMMAND = re.compile(
    r"`(?:foreword|make|scripts/|tests/|examples/)[^`]*`|^\$ (?:foreword|make) ", re.MULTILINE
)
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
MACHINE = re.compile(r"Neoverse|H200|x86")

# Times that are settings or definitions, not measurements.
SETTINGS = (
    "sampled every 50 ms",
    "5 ms, or the cost of one probe",
    "0.2% of them 20 ms longer",
    "0.4 ms per pass with a probe, 0.1 ms per request",
    "only to be tried | 0.3 ms",
)

ASSUMED = "illustrative"
"""The word by which a section says that its figures are examples, which nobody has measured."""


def sections(text: str) -> Iterator[tuple[str, str]]:
    """(heading, text) from one heading to the next; a line of code that begins with # is none."""
    heading, lines, is_code = "", list[str](), False
    for line in text.splitlines():
        is_code ^= line.startswith("```")
        if line.startswith("#") and not is_code:
            yield heading, "\n".join(lines)
            heading, lines = line, []
        lines.append(line)
    yield heading, "\n".join(lines)


def lacking(section: str) -> list[str]:
    """What is not said of a section's figures."""
    told = section
    for setting in SETTINGS:
        told = told.replace(setting, "")
    if not FIGURE.search(told) or ASSUMED in told:
        return []
    wanted = {"command": COMMAND, "date": DATE, "machine": MACHINE}
    return [name for name, pattern in wanted.items() if not pattern.search(section)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_say_where_they_come_from(page: Path):
    found = {heading: lacking(text) for heading, text in sections(page.read_text(encoding="utf-8"))}
    assert {heading: names for heading, names in found.items() if names} == {}


def test_a_figure_without_its_origin_is_found():
    text = "# A\n`foreword bench step` takes 5 ms (2026-11-15, H200).\n## B\nIt takes 6.5 ms.\n```\n# 7 ms\n```\n"
    assert [(heading, lacking(part)) for heading, part in sections(text)] == [
        ("", []),
        ("# A", []),
        ("## B", ["command", "date", "machine"]),
    ]
