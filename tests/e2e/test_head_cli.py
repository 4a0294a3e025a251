"""`foreword head` as a user runs it, and what it makes in use."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from helpers.command_line import assert_one_line_error, foreword, refusal
from helpers.tiny_heads import TinyHead
from helpers.tiny_models import make_hf_model


def test_a_pickled_head_is_converted_shown_made_smaller_and_used(tmp_path: Path):
    target = make_hf_model(tmp_path / "target", num_hidden_layers=6, max_position_embeddings=2048)
    head = TinyHead(360, draft_vocab=200).eagle3()
    head.tensors["embed_tokens.weight"] = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    pickled = head.save(tmp_path / "pickled", {"layers.0.": "midlayer."}, draft_vocab_size=200)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    assert_one_line_error(refusal("head", "show", str(pickled)), "pickled", "foreword head convert")

    plain, small = tmp_path / "plain", tmp_path / "small"
    run = foreword("head", "convert", str(pickled), str(plain))
    assert run.returncode == 0, run.stderr
    run = foreword("head", "quantize", str(plain), str(small), "--target", str(target), "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["bytes"] < 0.4 * sum(file.stat().st_size for file in plain.iterdir())
    run = foreword("head", "show", str(small), "--json")
    said = json.loads(run.stdout)
    assert (said["method"], said["layout"], said["draft_vocab_size"]) == ("eagle3", "speculators", 200)
    assert said["borrows"] == ["embed_tokens"], "the copy of the target's embedding is left out"
    assert said["eight_bit"] is True
    assert_one_line_error(
        refusal("head", "quantize", str(plain), str(tmp_path / "other"), "--bits", "5"),
        "--bits must be 8 or 4",
    )
    assert "method: eagle3" in foreword("head", "show", str(plain)).stdout

    answers = []
    for config in (
        "off",
        json.dumps({"model": str(plain), "fixed": True}),
        json.dumps({"model": str(small), "fixed": True}),
    ):
        run = foreword(
            "generate", "the sky", "--model", str(target), "--max-tokens", "12", "--temperature", "0", "--json",
            "--speculation", config,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        answers.append(json.loads(run.stdout.splitlines()[-1]))
    assert len({answer["text"] for answer in answers}) == 1
    assert [answer["timings"]["draft_n"] > 0 for answer in answers] == [False, True, True]


def test_heads_are_measured_beside_other_drafters(tmp_path: Path):
    target = make_hf_model(tmp_path / "target", num_hidden_layers=6, max_position_embeddings=2048)
    head = TinyHead(360, draft_vocab=200).eagle3().save(tmp_path / "head", draft_vocab_size=200)
    methods = f"ngram,{json.dumps({'method': 'eagle3', 'model': str(head)})}"
    options = ["--model", str(target), "--limit-per-category", "1", "--max-tokens", "8", "--json"]
    run = foreword("bench", "drafters", *options, "--methods", methods)
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout.splitlines()[-1])["rows"]
    measured = [row["drafter"] for row in rows if row["category"] == "all"]
    assert measured == ["ngram", "eagle3 model=head"]


def test_mistakes_are_one_line(tmp_path: Path, tiny_model: Path):
    head = str(TinyHead(360, draft_vocab=200).eagle3().save(tmp_path / "head", draft_vocab_size=200))
    out = str(tmp_path / "out")
    assert_one_line_error(refusal("head", "quantize", str(tiny_model), out), "no draft head")
    assert_one_line_error(refusal("head", "convert", head, str(tmp_path)), "exists")
    assert_one_line_error(
        refusal("head", "quantize", head, out, "--target", str(tiny_model)), "after layer -1 and it has 2"
    )
    config = json.dumps({"method": "eagle", "model": head})
    refused = foreword("generate", "x", "--model", str(tiny_model), "--speculative-config", config)
    assert_one_line_error(refused, "is a head for method 'eagle3'")
