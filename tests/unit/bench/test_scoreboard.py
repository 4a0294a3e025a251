"""The scoreboard is made of result files, and the page in the repository is what its files give."""

import json
from pathlib import Path

import pytest

from foreword.bench.scoreboard import scoreboard_page
from foreword.errors import RequestError

DOCS = Path(__file__).parents[3] / "docs"
MADE = {"command": "foreword bench compare", "date": "2026-11-18", "machine": "2 cores", "load": "load 8"}
ROWS = [
    {"label": "ours", "tokens_per_second": 20.4, "same_as_plain": 1.0, "first_ms": 61.2, "peak_bytes": 2**29},
    {"label": "theirs", "tokens_per_second": 30.6, "same_as_plain": None},
]


def write(folder: Path, name: str, **found: object) -> None:
    (folder / name).write_text(json.dumps(found), encoding="utf-8")


def test_the_page_shows_every_file_and_who_is_fastest(tmp_path: Path):
    write(tmp_path, "a.json", model="m", made=MADE, rows=ROWS)
    verdicts = [{"check": "greedy", "claim": "Greedy texts are equal", "verdict": "held"}]
    write(tmp_path, "b.json", title="llama.cpp, proved", made=MADE, verdicts=verdicts)
    page = scoreboard_page(tmp_path)
    assert "## m\n\n`foreword bench compare`: 2026-11-18; 2 cores; load 8. Raw data: `a.json`." in page
    assert "| ours | 20 | 100% | 61 ms | 512 MiB |" in page
    assert "| theirs | **31** |  |  |  |" in page
    assert "## llama.cpp, proved" in page
    assert "| Greedy texts are equal | held |" in page


def test_a_file_that_is_no_result_is_named(tmp_path: Path):
    with pytest.raises(RequestError, match="no result files"):
        scoreboard_page(tmp_path)
    write(tmp_path, "a.json", model="m", rows=ROWS)
    with pytest.raises(RequestError, match=r"a\.json has no 'made'"):
        scoreboard_page(tmp_path)


def test_the_page_in_the_repository_is_up_to_date():
    page = scoreboard_page(DOCS / "benchmarks" / "scoreboard")
    assert page == (DOCS / "scoreboard.md").read_text(encoding="utf-8"), "run foreword bench scoreboard"
