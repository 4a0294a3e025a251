"""`foreword train` as a user runs it, on a CPU and a tiny model."""

import json
from pathlib import Path

import pytest

from helpers.command_line import assert_one_line_error, foreword
from helpers.tiny_models import make_hf_model, write_tiny_tokenizer

_TINY = ("--batch-tokens", "1024", "--device", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_model(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def texts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "texts"
    run = foreword("train", "data", str(out), "-m", str(model), "--tokens", "3000", "--device", "cpu")
    assert run.returncode == 0, run.stderr
    assert "in answers" in run.stdout
    return out


def test_texts_are_shown(model: Path, texts: Path):
    run = foreword("train", "data", str(texts), "-m", str(model), "--show", "2")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("temperature") == 2 and "<|im_start|>" in run.stdout


@pytest.mark.parametrize("method", ["draft", "exit", "medusa", "dflash", "eagle3"])
def test_every_method_leaves_a_card_and_goes_on(method: str, model: Path, texts: Path, tmp_path: Path):
    out = tmp_path / "out"
    common = (
        "train",
        method,
        "-m",
        str(model),
        "--out",
        str(out),
        "--data",
        str(texts),
        "--steps",
        "2",
        *_TINY,
    )
    run = foreword(*common, "--export", str(tmp_path / "pieces"))
    assert run.returncode == 0, run.stderr
    assert f"foreword train {method}" in (out / "README.md").read_text(encoding="utf-8")
    assert_one_line_error(foreword(*common), "--resume")
    run = foreword("train", "join", str(tmp_path / "pieces"), str(tmp_path / "joined"), "-m", str(model))
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "joined" / "config.json").exists()


def test_a_draft_is_trained_without_data_and_used(model: Path, tmp_path: Path):
    out = tmp_path / "small"
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"turns": ["the sky", "the sea"]}\n', encoding="utf-8")
    run = foreword(
        "train", "draft", "-m", str(model), "--out", str(out), "--layers", "1", "--steps", "2", *_TINY,
        "--prompts", str(prompts), "--eval", str(prompts),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "files" in (out / "README.md").read_text(encoding="utf-8")
    config = json.dumps({"method": "draft_model", "model": str(out), "fixed": True})
    answers = [
        foreword("generate", "the sky", "-m", str(model), "--temperature", "0", "--speculation", how)
        for how in (config, "off")
    ]
    assert answers[0].returncode == 0, answers[0].stderr
    assert answers[0].stdout == answers[1].stdout


def test_what_cannot_be_done_is_told_in_a_line(model: Path, texts: Path, tmp_path: Path):
    out, empty = str(tmp_path / "out"), tmp_path / "empty.jsonl"
    empty.write_text("\n", encoding="utf-8")
    train = ("train", "medusa", "-m", str(model), "--out", out, *_TINY)
    assert_one_line_error(foreword(*train), "--minutes or --steps")
    assert_one_line_error(foreword(*train, "--steps", "1", "--eval", str(empty)), "has no prompts in it")
    nowhere = str(tmp_path / "nowhere")
    assert_one_line_error(foreword(*train, "--steps", "1", "--data", nowhere), "no training texts")
    assert_one_line_error(
        foreword("train", "data", nowhere, "-m", str(model), "--show", "1"), "no training texts"
    )
    plain = make_hf_model(tmp_path / "plain", "llama")
    write_tiny_tokenizer(plain, chat_template=None)
    run = foreword("train", "data", nowhere, "-m", str(plain), "--tokens", "10", "--device", "cpu")
    assert_one_line_error(run, "no chat template")
    assert not Path(nowhere).exists() and not Path(out).exists()
