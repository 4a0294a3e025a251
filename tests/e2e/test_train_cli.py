"""`foreword train` as a user runs it, on a CPU and a tiny model."""

import json
import signal
from pathlib import Path

import pytest
import torch
import typer

from foreword.cli.main import app
from foreword.cli.train import session
from foreword.errors import CheckpointError, ForewordError, RequestError
from foreword.train.files import require_run_directory
from foreword.train.texts.batches import EngineBatch
from foreword.train.texts.documents import count_shards, read_shards, write_shard
from helpers.command_line import assert_one_line_error, foreword
from helpers.tiny_families import make_family
from helpers.tiny_models import make_hf_model, write_tiny_tokenizer

_TINY = ("--batch-tokens", "1024", "--device", "cpu")


def _here(*arguments: object) -> int:
    """Without a process of its own: starting one takes longer than the work. The exit code."""
    return app([str(argument) for argument in arguments], standalone_mode=False) or 0


def _one_step(model: str, out: Path, texts: str | Path) -> None:
    """Medusa heads on these texts."""
    _here("train", "medusa", "-m", model, "--out", out, "--data", texts, "--steps", "1", *_TINY)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_hf_model(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=2048))


@pytest.fixture(scope="module")
def texts(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("data") / "texts"
    _here("train", "data", out, "-m", model, "--tokens", "3000", "--device", "cpu")
    assert list(out.glob("shard-*.safetensors"))
    return str(out)


def test_what_guesses_bring_for_texts_is_not_kept_for_others(model: str):
    """Requests of later commands would be decoded by what pays for texts that nobody has asked for."""
    batch = session.TrainingTarget(model, "cpu", compiled=False).batch(2, 256, seed=0)
    assert isinstance(batch, EngineBatch)
    assert batch._core.saved_estimates is None


def test_texts_are_shown(model: str, texts: str, capsys: pytest.CaptureFixture[str]):
    _here("train", "data", texts, "-m", model, "--show", "2")
    shown = capsys.readouterr().out
    assert shown.count("temperature") == 2 and "<|im_start|>" in shown


@pytest.mark.parametrize(
    "method", ["draft", "exit", "medusa", pytest.param("dflash", marks=pytest.mark.slow), "eagle3"]
)
def test_every_method_leaves_a_card_and_pieces(method: str, model: str, texts: str, tmp_path: Path):
    out, pieces, joined = tmp_path / "out", tmp_path / "pieces", tmp_path / "joined"
    common = ("train", method, "-m", model, "--out", out, "--data", texts, "--steps", "2", *_TINY)
    _here(*common, "--export", pieces, "--export-bits", "8")
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "2 steps of 1,024 tokens" in card and "SHA-256" in card
    with pytest.raises(RequestError, match="--resume"):
        _here(*common)
    _here("train", "join", pieces, joined, "-m", model)
    assert json.loads((joined / "config.json").read_text()) == json.loads((out / "config.json").read_text())


def test_heads_are_trained_for_recurrent_models_but_no_draft_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path, _ = make_family(tmp_path / "lfm2", "lfm2")
    out = tmp_path / "out"
    common = ("-m", path, "--out", out, "--steps", "2", *_TINY)
    for method in ("draft", "exit"):
        with pytest.raises(CheckpointError, match="lfm2 model's recurrent layers; train eagle3, dflash or"):
            _here("train", method, *common)
    _here("train", "eagle3", *common)
    assert "eagle3, with a card" in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["speculators_model_type"] == "eagle3"


def test_a_draft_is_trained_without_data_and_used(model: str, tmp_path: Path):
    out, picture, prompts = tmp_path / "small", tmp_path / "curves.png", tmp_path / "mine.jsonl"
    prompts.write_text('{"turns": ["the sky", "the sea"]}\n', encoding="utf-8")
    plots = ["--plot", str(picture)] if _has_matplotlib() else []
    run = foreword(
        "train", "draft", "-m", model, "--out", str(out), "--layers", "1", "--steps", "12", *_TINY,
        "--prompts", str(prompts), "--eval", str(prompts), *plots,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "step 10: loss" in run.stdout and "τ at 4 draft tokens, files" in run.stdout
    # The table at the end: tokens per pass and expected speed-up by kind of text, the best depth, and the command.
    assert "4 draft tokens:" in run.stdout and "expected speed-up" in run.stdout
    assert "× expected" in run.stdout or "plain decoding is faster here" in run.stdout
    assert f"foreword generate 'Hello.' --model {model} --speculation" in run.stdout
    assert "foreword train draft" in (out / "README.md").read_text(encoding="utf-8")
    assert not plots or picture.stat().st_size > 1000
    config = json.dumps({"method": "draft_model", "model": str(out), "fixed": True})
    answers = [
        foreword("generate", "the sky", "-m", model, "--temperature", "0", "--speculation", how)
        for how in (config, "off")
    ]
    assert answers[0].returncode == 0, answers[0].stderr
    assert answers[0].stdout == answers[1].stdout


def _has_matplotlib() -> bool:
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def test_an_interruption_leaves_a_state_and_no_model(
    model: str,
    texts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def press_control_c(watcher: session.ConsoleWatcher, share: float, line: str) -> None:
        if line.startswith("step 2"):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(session.ConsoleWatcher, "progress", press_control_c)
    common = ("train", "medusa", "-m", model, "--out", tmp_path / "out", "--data", texts, *_TINY)
    assert _here(*common, "--steps", "50") == 130
    assert "--resume continues" in capsys.readouterr().out
    assert (tmp_path / "out/training/state.pt").exists() and not (tmp_path / "out/config.json").exists()
    monkeypatch.undo()
    _here(*common, "--steps", "1", "--resume")
    assert "3 steps" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_texts_that_were_written_before_an_interruption_stay(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def press_control_c(watcher: session.ConsoleWatcher, share: float, line: str) -> None:
        if share and not pressed:
            pressed.append(signal.raise_signal(signal.SIGINT))

    monkeypatch.setattr(session.ConsoleWatcher, "progress", press_control_c)
    texts, out, pressed = tmp_path / "texts", tmp_path / "out", []
    assert _here("train", "data", texts, "-m", model, "--tokens", "9999", "--device", "cpu") == 130
    assert count_shards(texts) == 1
    pressed.clear()
    train = ("train", "medusa", "-m", model, "--out", out, "--steps", "1", *_TINY)
    assert _here(*train) == 130
    assert "the same command continues" in capsys.readouterr().out
    assert [path.name for path in out.iterdir()] == ["texts"]
    require_run_directory(out, resume=False)


def test_a_full_device_is_told_in_a_line(
    model: str, texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_args: object, **_more: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")

    monkeypatch.setattr("foreword.train.loop.run.Trainer.train", full)
    with pytest.raises(RequestError, match=r"out of memory.*give fewer --batch-tokens"):
        _one_step(model, tmp_path / "out", texts)
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--out", "OUT"), "--minutes or --steps"),
        (("--out", "OUT", "--steps", "1", "--resume"), "has no training state to resume"),
        (("--out", "OUT", "--steps", "1", "--export", "HERE"), "are not pieces of"),
        (("--out", "OUT", "--steps", "1", "--eval", "EMPTY"), "has no prompts"),
        (("--out", "OUT", "--steps", "1", "--eval", "BROKEN"), "line 1: not JSON"),
        (("--out", "OUT", "--steps", "1", "--data", "NOWHERE"), "no training texts"),
        (("--out", "OUT", "--steps", "1", "--data", "NOWHERE", "--prompts", "EMPTY"), "train data"),
        (("--out", "OUT", "--steps", "1", "--export-bits", "5"), "--export-bits must be 4, 8 or 16"),
    ],
)
def test_what_cannot_be_done_is_told(arguments: tuple[str, ...], words: str, model: str, tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    (tmp_path / "broken.jsonl").write_text("{\n", encoding="utf-8")
    names = {
        "OUT": "out",
        "HERE": ".",
        "EMPTY": "empty.jsonl",
        "BROKEN": "broken.jsonl",
        "NOWHERE": "nowhere",
    }
    given = [str(tmp_path / names[word]) if word in names else word for word in arguments]
    with pytest.raises(ForewordError, match=words):
        _here("train", "medusa", "-m", model, *_TINY, *given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--round-bits", "5"), "--round-bits must be 4 or 8, not 5"),
        (("--round-bits", "4", "--no-final"), "--round-bits needs the decay"),
    ],
)
def test_rounding_that_cannot_be_done_is_told(
    arguments: tuple[str, ...], words: str, model: str, tmp_path: Path
):
    with pytest.raises(ForewordError, match=words):
        _here("train", "eagle3", "-m", model, "--out", str(tmp_path / "out"), "--steps", "1", *arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("data", "FILE", "--tokens", "10"),
        ("data", "FILE/below", "--tokens", "10"),
        ("medusa", "--out", "FILE", "--steps", "1"),
        ("medusa", "--out", "OUT", "--export", "FILE", "--steps", "1"),
        ("join", "PIECES", "FILE"),
    ],
)
def test_a_file_where_a_directory_should_be_is_told_before_any_work(
    arguments: tuple[str, ...], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "FILE").write_text("mine", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "TrainingTarget", None)
    with pytest.raises(RequestError, match="FILE is a file; give another path"):
        _here("train", *arguments, "-m", model)
    assert [path.name for path in tmp_path.iterdir()] == ["FILE"]


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [
        ("medusa", "--adam", "-5"),
        ("medusa", "--muon", "-1"),
        ("medusa", "--decay-share", "0"),
        ("medusa", "--evaluate-every", "-1"),
        ("medusa", "--sharpness", "-1"),
        ("medusa", "--seed", "-1"),
        ("eagle3", "--intermediate", "-3"),
        ("draft", "--heads", "0"),
    ],
)
def test_values_out_of_range_are_told(method: str, option: str, value: str, model: str, tmp_path: Path):
    with pytest.raises(typer.BadParameter):
        _here("train", method, "-m", model, "--out", tmp_path / "out", "--steps", "1", option, value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("eagle3", "--taps", "1,2,99"), "--taps must be within 0 .. 2, not 99"),
        (("dflash", "--taps", "-1"), "--taps must be within"),
        (("exit", "--layer", "2"), "the exit must be after layer 1"),
        (("draft", "--copy", "0,7"), "layers to copy must be within"),
        pytest.param(
            ("medusa", "--device", "cuda"),
            "torch sees no CUDA GPU; use cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_what_a_model_or_machine_has_not_is_told_before_any_work(
    arguments: tuple[str, ...], words: str, model: str, tmp_path: Path
):
    with pytest.raises(RequestError, match=words):
        _here("train", *arguments, "-m", model, "--out", tmp_path / "out", "--steps", "1")
    assert not (tmp_path / "out").exists()


def test_a_shard_that_is_cut_off_is_told(model: str, texts: str, tmp_path: Path):
    shard = next(Path(texts).glob("shard-*"))
    (tmp_path / shard.name).write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(RequestError, match="is not a valid shard of training texts"):
        _here("train", "data", tmp_path, "-m", model, "--show", "1")
    with pytest.raises(RequestError, match="is not a valid shard of training texts"):
        _one_step(model, tmp_path / "out", tmp_path)


def test_texts_and_states_of_another_model_are_told(model: str, texts: str, tmp_path: Path):
    other = make_hf_model(tmp_path / "other", "llama", seed=1, max_position_embeddings=2048)
    train = ("train", "medusa", "--out", tmp_path / "out", "--steps", "1", *_TINY)
    for arguments in (
        (*train, "--data", texts),
        ("train", "data", texts, "--show", "1"),
        ("train", "data", texts, "--tokens", "10", "--device", "cpu"),
    ):
        with pytest.raises(RequestError, match="was written by another model; give a directory"):
            _here(*arguments, "-m", other)
    _here(*train, "--data", texts, "-m", model)
    strangers = tmp_path / "strangers"
    write_shard(strangers, list(read_shards(Path(texts))))  # which do not say whose they are
    with pytest.raises(RequestError, match="was trained for another model"):
        _here(*train, "--data", strangers, "-m", other, "--resume")
    _here(*train, "--data", strangers, "-m", model, "--resume")


def test_the_model_itself_is_not_trained_over(model: str, texts: str):
    before = {path: path.read_bytes() for path in Path(model).iterdir()}
    with pytest.raises(RequestError, match="give a new directory"):
        _here("train", "medusa", "-m", model, "--out", model, "--data", texts, "--steps", "1", *_TINY)
    assert {path: path.read_bytes() for path in Path(model).iterdir()} == before


def test_a_model_without_a_chat_template_is_told_in_one_line(tmp_path: Path):
    plain = make_hf_model(tmp_path / "plain", "llama")
    write_tiny_tokenizer(plain, chat_template=None)
    texts = str(tmp_path / "texts")
    run = foreword("train", "data", texts, "-m", str(plain), "--tokens", "10", "--device", "cpu")
    assert_one_line_error(run, "no chat template", "instruct model")
    assert not Path(texts).exists()
    with pytest.raises(RequestError, match="no training texts"):
        _here("train", "data", texts, "-m", str(plain), "--show", "1")
