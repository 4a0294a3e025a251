"""`foreword bench drafters` and `foreword bench overhead` as a user runs them."""

import json
from pathlib import Path

import pytest

from helpers.command_line import assert_one_line_error, foreword

FEW_PROMPTS = [
    {"question_id": 1, "category": "chat", "turns": ["the sky", "more"]},
    {"question_id": 2, "category": "chat", "turns": ["the sea, the sea, the sea"]},
    {"task_id": "T/1", "prompt": "def add(first, second):"},
]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in FEW_PROMPTS))
    return path


def bench(model: Path, dataset: Path, *more: str):
    options = ["--model", str(model), "--dataset", str(dataset), "--max-tokens", "16"]
    return foreword("bench", "drafters", *options, *more)


def rows_of(run) -> dict[tuple[str, str], dict]:
    assert run.returncode == 0, run.stderr
    return {(row["drafter"], row["category"]): row for row in json.loads(run.stdout)["rows"]}


def test_rows_for_every_drafter_and_category_and_a_run_that_goes_on(
    tiny_model: Path, dataset: Path, tmp_path: Path
):
    ledger = tmp_path / "runs.jsonl"
    resume = ["--resume", str(ledger), "--json"]
    first = rows_of(bench(tiny_model, dataset, "--methods", "ngram", *resume, "--limit-per-category", "1"))
    assert list(first) == [("ngram", "chat"), ("ngram", "code"), ("ngram", "all")]
    assert first["ngram", "all"]["prompts"] == 2
    kept = ledger.read_text().splitlines()
    assert len(kept) == 1 + 2

    second = rows_of(bench(tiny_model, dataset, "--methods", "ngram,suffix+ngram", *resume))
    assert second["ngram", "all"]["prompts"] == second["suffix+ngram", "all"]["prompts"] == 3
    assert ledger.read_text().splitlines()[: len(kept)] == kept
    assert len(ledger.read_text().splitlines()) == 1 + 6
    for row in second.values():
        assert row["tau"] >= 1
        assert row["different_texts"] == 0
        assert row["tokens_per_second"] > 0
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / row["plain_tokens_per_second"])

    third = rows_of(bench(tiny_model, dataset, "--methods", "ngram,suffix+ngram", *resume))
    assert third == second  # nothing was measured again
    refused = bench(tiny_model, dataset, *resume, "--temperature", "0.5")
    assert_one_line_error(refused, "temperature", str(ledger))


def test_sampling_with_a_seed_leaves_the_texts_as_they_are(tiny_model: Path, dataset: Path):
    run = bench(
        tiny_model,
        dataset,
        "--temperature",
        "0.8",
        "--seed",
        "5",
        "--methods",
        "suffix",
        "--history",
        "--json",
    )
    assert rows_of(run)["suffix", "all"]["different_texts"] == 0
    for word in ("suffix", "chat", "code", "all", "τ"):
        assert word in run.stderr


def test_what_cannot_be_measured_is_refused_in_one_line(tiny_model: Path, dataset: Path, tmp_path: Path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "fine"}\n{"question": \n')
    assert_one_line_error(bench(tiny_model, bad), "bad.jsonl", "line 2")
    assert_one_line_error(bench(tiny_model, tmp_path / "none.jsonl"), "none.jsonl")
    assert_one_line_error(bench(tiny_model, dataset, "--methods", "oracle"), "oracle", "ngram")
    assert_one_line_error(bench(tiny_model, dataset, "--repeats", "0"), "--repeats")
    assert_one_line_error(
        bench(tiny_model, dataset, "--history", "--resume", str(tmp_path / "x")), "--history"
    )
    assert_one_line_error(
        foreword("bench", "overhead", "--model", str(tiny_model), "--contexts", "9999"), "contexts"
    )


def bench_contexts(model: Path, lengths: str, *more: str):
    options = ["--model", str(model), "--methods", "ngram", "--max-tokens", "8", "--context", lengths]
    return foreword("bench", "drafters", *options, *more)


def test_rows_by_context_length(tiny_model: Path):
    run = bench_contexts(tiny_model, "100,200", "--json")
    rows = rows_of(run)
    assert list(rows) == [("ngram", kind) for kind in ("100 tokens", "200 tokens", "all")]
    assert [row["prompts"] for row in rows.values()] == [4, 4, 8]
    assert all(row["tau"] >= 1 and row["speedup"] > 0 and not row["different_texts"] for row in rows.values())
    assert "200 tokens" in run.stderr


def test_a_grid_by_context_length(tiny_model: Path):
    run = bench_contexts(
        tiny_model, "100", "--limit-per-category", "1", "--concurrency", "2", "--temperatures", "0", "--json"
    )
    assert {key: row["requests"] for key, row in rows_of(run).items()} == {
        ("plain", "100 tokens"): 4,
        ("ngram", "100 tokens"): 4,
    }


def test_contexts_that_cannot_be_measured_are_refused_in_one_line(tiny_model: Path, dataset: Path):
    assert_one_line_error(bench_contexts(tiny_model, "100,9999"), "--context 9999", "answers of 8")
    assert_one_line_error(bench_contexts(tiny_model, "0"), "--context")
    assert_one_line_error(bench_contexts(tiny_model, "100", "--dataset", str(dataset)), "--dataset")


def test_a_plot_is_drawn_or_says_what_it_needs(tiny_model: Path, dataset: Path, tmp_path: Path):
    picture = tmp_path / "rows.png"
    run = bench(
        tiny_model, dataset, "--methods", "ngram", "--limit-per-category", "1", "--plot", str(picture)
    )
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert_one_line_error(run, "matplotlib", "foreword[plot]")
    else:
        assert run.returncode == 0, run.stderr
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_overhead_relates_drafts_to_passes(tiny_model: Path):
    options = ["--model", str(tiny_model), "--contexts", "20,60", "--repeats", "2", "--json"]
    run = foreword("bench", "overhead", *options, "--batches", "1,3")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    rows, host = found["rows"], found["host"]
    assert [(row["drafter"], row["context"]) for row in rows] == [
        ("ngram", 20),
        ("suffix", 20),
        ("ngram", 60),
        ("suffix", 60),
    ]
    assert all(row["draft_ms"] > 0 and row["verify_ms"]["6"] > 0 for row in rows)
    assert {(time["way"], time["batch"]) for time in host} >= {("plain", 1), ("plain", 3), ("ngram", 3)}
    assert "us per request" in run.stderr
