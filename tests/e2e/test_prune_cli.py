"""`foreword prune` as a user runs it, and the benchmark of what it makes."""

import json
from pathlib import Path

from helpers.command_line import assert_one_line_error, foreword, refusal
from helpers.tiny_models import make_hf_model, write_gguf


def test_pruned_copies_answer_and_draft(tmp_path: Path):
    directory = make_hf_model(tmp_path / "model", num_hidden_layers=5, max_position_embeddings=2048)
    file = write_gguf(directory, tmp_path / "model.gguf", "Q8_0")
    run = foreword("prune", str(directory), str(tmp_path / "small"), "--layers", "0-1,4")
    assert run.returncode == 0, run.stderr
    assert "3 layers (0, 1, 4)" in run.stdout
    assert "made" not in run.stdout
    deep = tmp_path / "new" / "deep"
    run = foreword("prune", str(file), str(deep / "small.gguf"), "--keep", "2")
    assert run.stdout.splitlines()[0] == f"made {tmp_path / 'new'}, {deep}"
    run = foreword("prune", str(file), str(tmp_path / "small.gguf"), "--keep", "3", "--json")
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    assert said["layers"] == [0, 2, 4]
    assert said["bytes"] == (tmp_path / "small.gguf").stat().st_size < file.stat().st_size
    for pruned in ("small", "small.gguf"):
        answer = foreword(
            "generate", "the sky", "--model", str(tmp_path / pruned), "--max-tokens", "3", "--json"
        )
        assert answer.returncode == 0, answer.stderr

    method = json.dumps({"method": "draft_model", "model": str(tmp_path / "small.gguf")})
    options = ["--model", str(file), "--limit-per-category", "1", "--max-tokens", "8", "--json"]
    run = foreword("bench", "drafters", *options, "--methods", f"ngram,{method}", "--backend", "torch")
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout)["rows"]
    measured = [row for row in rows if row["category"] == "all"]
    assert [row["drafter"] for row in measured] == ["ngram", "draft_model model=small.gguf"]
    assert measured[1]["memory_bytes"] > measured[0]["memory_bytes"] > 0


def test_mistakes_are_one_line(tmp_path: Path, tiny_model: Path):
    out = str(tmp_path / "small")
    assert_one_line_error(refusal("prune", str(tiny_model), out), "--layers", "--keep")
    assert_one_line_error(
        refusal("prune", str(tiny_model), out, "--keep", "1", "--layers", "0"), "--layers", "--keep"
    )
    assert_one_line_error(refusal("prune", str(tiny_model), out, "--keep", "0"), "from 1 to 2")
    assert_one_line_error(refusal("prune", str(tiny_model), out, "--layers", "0-5"), "layer 2")
    assert_one_line_error(refusal("prune", str(tiny_model), out, "--layers", "first"), "'first'")
    assert_one_line_error(refusal("prune", str(tiny_model), str(tmp_path), "--keep", "1"), "exists")
    assert_one_line_error(refusal("prune", "no-such-model", out, "--keep", "1"), "no-such-model")
