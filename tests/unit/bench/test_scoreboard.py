"""The scoreboard is made of result files, and the page in the repository is what its files give."""

import json
from pathlib import Path

import pytest

from foreword.bench.scoreboard import scoreboard_page
from foreword.errors import RequestError

DOCS = Path(__file__).parents[3] / "docs"
MADE = {"command": "foreword bench compare", "date": "2026-11-18", "machine": "2 cores", "load": "load 8"}
ROWS = [
    {
        "label": "foreword auto",
        "tokens_per_second": 20.4,
        "same_as_plain": 1.0,
        "first_ms": 61.2,
        "peak_bytes": 2**29,
    },
    {"label": "theirs", "tokens_per_second": 30.6, "same_as_plain": None},
]


def write(folder: Path, name: str, **found: object) -> None:
    (folder / name).write_text(json.dumps(found), encoding="utf-8")


def test_the_page_shows_every_file_and_who_is_fastest(tmp_path: Path):
    write(
        tmp_path, "a.json", model="m", made=MADE, rows=ROWS, absent=["vllm plain cannot be compared: no GPU"]
    )
    page = scoreboard_page(tmp_path)
    assert "## m\n\n`foreword bench compare`: 2026-11-18; 2 cores; load 8. Raw data: `a.json`." in page
    assert "| foreword auto | 20 | 100% | **61 ms** | **512 MiB** |" in page
    assert "| theirs | **31** |  |  |  |" in page
    assert "Others are better in: tokens/s (theirs 31, foreword 20)." in page
    assert "- not measured: vllm plain cannot be compared: no GPU" in page


def test_a_table_in_which_we_lead_says_so(tmp_path: Path):
    write(tmp_path, "a.json", model="m", made=MADE, rows=ROWS[:1])
    assert "Others are better in: no column of this table." in scoreboard_page(tmp_path)


def test_kinds_of_prompts_have_a_table_of_their_own(tmp_path: Path):
    kinds = {
        "qa": {"foreword auto": 20.4, "theirs": 30.6},
        "math_reasoning": {"foreword auto": 9, "theirs": 8},
    }
    write(tmp_path, "a.json", model="m", made=MADE, rows=ROWS, categories=kinds)
    page = scoreboard_page(tmp_path)
    assert "| engine | qa | math reasoning |" in page
    assert "| foreword auto | 20.4 | **9.0** |" in page
    assert "| theirs | **30.6** | 8.0 |" in page


def test_verdicts_of_one_model_are_columns_of_one_table(tmp_path: Path):
    def verdict(found: str, check: str = "seed alone") -> dict[str, str]:
        return {"check": check, "claim": "a claim", "verdict": found, "detail": "texts differ"}

    about = {"title": "m, cpu", "made": MADE, "plan": "brief", "requests_made": 9, "seconds": 61.4}
    write(tmp_path, "a.json", **about, engine="foreword", verdicts=[verdict("held")])
    theirs = [verdict("refuted"), verdict("held", "stop"), verdict("refuted", "n")]
    write(tmp_path, "b.json", **about, engine="llama.cpp", verdicts=theirs)
    write(
        tmp_path, "c.json", **about, engine="vLLM", verdicts=[], absent=["the server did not start: no GPU"]
    )
    write(tmp_path, "d.json", **{**about, "title": "n, cpu"}, engine="foreword", verdicts=[verdict("held")])
    page = scoreboard_page(tmp_path)
    table = "| check | foreword | llama.cpp |\n| --- | --- | --- |\n| seed alone | held | refuted |\n"
    table += "| stop | not tried | held |\n| n | not tried | refuted |\n\n"
    assert table + "- llama.cpp: seed alone, n: refuted: texts differ\n" in page
    assert "Raw data: `a.json`. Size: brief, 9 requests in 61 s." in page
    assert "Raw data: `c.json`. Not examined: the server did not start: no GPU." in page
    assert page.count("| check |") == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", r"a\.json has no 'made'"),
        ('{"made": {"command": "c", "date": "d"}}', r"a\.json has no 'machine'"),
        ('{"made": {"command": "c", "date": "d", "machine": "m"}}', r"a\.json has no 'rows or verdicts'"),
        ("no JSON", r"a\.json is not a result file"),
        ("[1]", r"a\.json is not a result file"),
    ],
)
def test_a_file_that_is_no_result_is_named(tmp_path: Path, text: str, message: str):
    with pytest.raises(RequestError, match="no result files"):
        scoreboard_page(tmp_path)
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    with pytest.raises(RequestError, match=message):
        scoreboard_page(tmp_path)


def test_the_page_in_the_repository_is_up_to_date():
    page = scoreboard_page(DOCS / "benchmarks" / "scoreboard")
    assert page == (DOCS / "scoreboard.md").read_text(encoding="utf-8"), "run foreword bench scoreboard"
