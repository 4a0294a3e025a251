"""`foreword datastore` as a user runs it, and a benchmark of the drafter that reads it."""

import json
from pathlib import Path

from helpers.command_line import assert_one_line_error, foreword, refusal
from helpers.tiny_models import make_hf_model


def test_a_datastore_is_made_shown_and_drafted_from(tmp_path: Path):
    model = str(make_hf_model(tmp_path / "model", max_position_embeddings=2048))
    (tmp_path / "text.txt").write_text("the sky is blue and the sea is blue\n" * 50, encoding="utf-8")
    store = tmp_path / "new" / "text.store"
    run = foreword(
        "datastore", "build", str(tmp_path / "text.txt"), "--out", str(store), "--model", model, "--json"
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["bytes"] == store.stat().st_size
    run = foreword("datastore", "show", str(store))
    assert run.returncode == 0, run.stderr
    assert "every byte" in run.stdout
    assert "text.txt" in run.stdout
    method = json.dumps({"method": "rest", "datastore": str(store), "min_match": 1})
    options = ["--model", model, "--limit-per-category", "1", "--max-tokens", "8", "--json"]
    run = foreword(
        "bench", "drafters", *options, "--methods", f"lookahead,jacobi,{method}", "--backend", "torch"
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout.splitlines()[-1])["rows"]
    measured = [row["drafter"] for row in rows if row["category"] == "all"]
    assert measured == ["lookahead", "jacobi", "rest datastore=text.store min_match=1"]


def test_mistakes_are_one_line(tmp_path: Path, tiny_model: Path):
    text, store = tmp_path / "text.txt", str(tmp_path / "text.store")
    text.write_text("the sky", encoding="utf-8")
    assert_one_line_error(refusal("datastore", "show", str(text)), "not a datastore")
    build = ["datastore", "build", "--model", str(tiny_model), "--out"]
    assert_one_line_error(refusal(*build, str(text), str(text)), "exists already")
    assert_one_line_error(foreword(*build, store, str(tmp_path / "no.txt")), "no.txt")
    run = foreword(*build, store, str(text))
    assert run.returncode == 0, run.stderr
    damaged = bytearray(Path(store).read_bytes())
    damaged[-1] ^= 1
    Path(store).write_bytes(damaged)
    assert_one_line_error(refusal("datastore", "show", store), "damaged")
