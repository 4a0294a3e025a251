"""The grid on a tiny model: every cell, resumed where it was left."""

import json
from pathlib import Path

import pytest

from foreword import LLM
from foreword.bench.drafters.grid import GridBench, GridCell, GridSettings
from foreword.bench.methods import parse_methods
from foreword.bench.prompts import BenchPrompt
from foreword.engine.config import EngineConfig
from helpers.command_line import assert_one_line_error, foreword, refusal

PROMPTS = [BenchPrompt("1", "chat", "one two one two one two"), BenchPrompt("2", "code", "def add(a, b):")]


def test_every_cell_is_measured_once(tiny_model):
    llm = LLM(str(tiny_model))
    is_on_cpu = llm.engine.target.device.type == "cpu"
    bench = GridBench(llm, parse_methods("ngram"), GridSettings(max_tokens=8))
    cells = [
        GridCell(kind, warm, count) for kind in ("chat", "code") for warm in (0.0, 1.0) for count in (1, 3)
    ]
    told = []
    records = list(bench.measure(PROMPTS, cells, [], lambda stage, done, whole: told.append(whole)))
    assert [record.key for record in records] == [
        (name, cell) for cell in cells for name in ("plain", "ngram")
    ]
    assert set(told) == {16}
    for record in records:
        assert record.requests == max(2 * record.concurrency, 1)
        assert record.tokens == record.requests * 8
        assert (record.cpu_seconds > 0) == is_on_cpu
        assert 0 < record.latency_p50 <= record.latency_max <= record.seconds
    plain = [record for record in records if record.drafter == "plain"]
    assert all(record.passes == record.tokens and not record.drafted_per_position for record in plain)
    rest = list(bench.measure(PROMPTS, cells, records[:-1], lambda stage, done, whole: None))
    assert [record.key for record in rest] == [records[-1].key]


def test_passes_that_read_a_prompt_in_pieces_do_not_count(tiny_model):
    llm = LLM(str(tiny_model), config=EngineConfig(max_num_batched_tokens=8))
    bench = GridBench(llm, parse_methods("ngram"), GridSettings(max_tokens=8))
    long = [BenchPrompt("1", "chat", "one two three four five six seven eight nine ten eleven twelve")]
    plain, _ = bench.measure(long, [GridCell("chat", 0.0, 2)], [], lambda stage, done, whole: None)
    assert plain.tokens_per_pass == 1


@pytest.mark.slow
def test_the_command_writes_a_page_and_goes_on_where_it_was(tiny_model, tmp_path: Path):
    data = tmp_path / "prompts.jsonl"
    data.write_text(json.dumps({"turns": ["one two one two"], "category": "chat", "question_id": 1}) + "\n")
    page, kept = tmp_path / "grid.html", tmp_path / "grid.jsonl"
    options = ("--model", str(tiny_model), "--dataset", str(data), "--methods", "ngram", "--max-tokens", "8")
    more = (
        "--concurrency",
        "1,2",
        "--temperatures",
        "0,1",
        "--page",
        str(page),
        "--resume",
        str(kept),
        "--json",
    )
    for _ in range(2):
        run = foreword("bench", "drafters", *options, *more)
        assert run.returncode == 0, run.stderr
        rows = json.loads(run.stdout)["rows"]
        assert len(rows) == 8
        assert len(kept.read_text(encoding="utf-8").splitlines()) == 9
    assert "temperature 1" in page.read_text(encoding="utf-8")
    data.write_text(data.read_text().replace("one two", "two one"))
    assert_one_line_error(foreword("bench", "drafters", *options, *more), "was measured with prompts_digest")


def test_bad_numbers_are_refused_in_one_line():
    assert_one_line_error(
        refusal("bench", "drafters", "--temperatures", "hot"), "--temperatures takes numbers"
    )
    assert_one_line_error(refusal("bench", "drafters", "--concurrency", "0"), "--concurrency takes numbers")
