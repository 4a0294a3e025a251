"""A whole run: what it leaves, how it goes on, and what it refuses."""

import itertools
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from foreword.errors import RequestError
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.heads.describe import describe_trained
from foreword.train import files
from foreword.train.files import require_run_directory, require_same_kind
from foreword.train.heads.dflash import DFlashRecipe
from foreword.train.heads.medusa import MedusaRecipe
from foreword.train.loop.output import _rounded, digest_of, read_weights
from foreword.train.loop.run import SavedTraining, TrainRun, train
from foreword.train.loop.trainer import Trainer, TrainPhase
from foreword.train.passes.plain_target import PlainTarget
from foreword.train.texts.documents import FILES, HELD_OUT, Document, gather_texts, make_document, write_shard
from foreword.train.texts.prompts import FilePrompt
from helpers.tiny_heads import TinyHead
from helpers.tiny_training import SETTINGS

RECIPE = MedusaRecipe(heads=2, draft_vocab=64)


class _Silent:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.shares: list[float] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def progress(self, share: float, line: str) -> None:
        self.shares.append(share)


def _run(out: Path, **changes: object) -> TrainRun:
    run = TrainRun(
        out=out,
        recipe=RECIPE,
        batch_rows=440,
        tail_multiple=40,
        steps=6,
        report_every=2,
        settings=SETTINGS,
        command="foreword train medusa --out x",
    )
    return replace(run, **changes)


@pytest.fixture
def texts(documents: list[Document], tmp_path: Path):
    held_out = [replace(document, held_out=True) for document in documents[:20]]
    rest = [replace(document, held_out=False) for document in documents[20:]]
    write_shard(tmp_path / "texts", [*held_out, *rest])
    return gather_texts(tmp_path / "texts", [], lambda _: [], 256, "tiny")


def test_a_run_leaves_weights_card_and_log(target: PlainTarget, texts, tiny_model: Path, tmp_path: Path):
    watcher = _Silent()
    reports = train(open_checkpoint(tiny_model), target, _run(tmp_path / "out"), texts, watcher)
    assert reports is not None and set(reports) == {HELD_OUT}
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    digest = card.split("SHA-256 `")[1].split("`")[0]
    assert digest == digest_of(tmp_path / "out" / "model.safetensors")
    for part in (
        "foreword train medusa --out x",
        "6 steps of 440 tokens",
        "held out and never trained on",
        "| all |",
    ):
        assert part in card, part
    rates = json.loads((tmp_path / "out/config.json").read_text(encoding="utf-8"))["acceptance_by_level"]
    assert len(rates) == reports[HELD_OUT].depth and all(0 <= rate <= 1 for rate in rates)
    log = [json.loads(line) for line in (tmp_path / "out/training/log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log if "loss" in entry] == [2, 4, 6]
    assert any("tau" in entry for entry in log)
    assert watcher.shares == sorted(watcher.shares) and watcher.shares[-1] == 1.0


def test_a_run_that_is_stopped_goes_on_exactly(target: PlainTarget, texts, tiny_model: Path, tmp_path: Path):
    checkpoint = open_checkpoint(tiny_model)
    whole = train(checkpoint, target, _run(tmp_path / "whole"), texts, _Silent())
    looks = itertools.count()
    stopped = _run(tmp_path / "parts", stop=lambda: next(looks) >= 4)
    assert train(checkpoint, target, stopped, texts, _Silent()) is None
    assert not (tmp_path / "parts" / "config.json").exists()
    rest = _run(tmp_path / "parts", resume=True, steps=2)
    assert train(checkpoint, target, rest, texts, _Silent()) is not None and whole is not None
    first, second = (read_weights(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    for name, tensor in first.items():
        assert torch.equal(second[name], tensor), name


def test_states_are_saved_within_a_minute(target: PlainTarget, texts, tiny_model: Path, tmp_path: Path):
    now = itertools.count(0, 8)
    saved: list[bool] = []

    class Watching(_Silent):
        def progress(self, share: float, line: str) -> None:
            saved.append((tmp_path / "out/training/state.pt").exists())

    run = _run(tmp_path / "out", steps=20, clock=lambda: float(next(now)), evaluate_every=1e9)
    train(open_checkpoint(tiny_model), target, run, texts, Watching())
    assert any(saved)


def test_another_shape_or_a_directory_in_use_is_refused(
    target: PlainTarget, texts, tiny_model: Path, tmp_path: Path
):
    checkpoint = open_checkpoint(tiny_model)
    train(checkpoint, target, _run(tmp_path / "out", steps=1), texts, _Silent())
    with pytest.raises(RequestError, match="--resume"):
        train(checkpoint, target, _run(tmp_path / "out", steps=1), texts, _Silent())
    other = _run(tmp_path / "out", resume=True, recipe=MedusaRecipe(heads=3, draft_vocab=64))
    with pytest.raises(RequestError, match="was trained with heads 2, not 3"):
        train(checkpoint, target, other, texts, _Silent())
    (tmp_path / "out/training/state.pt").write_bytes(b"half")
    with pytest.raises(RequestError, match="is not a training state"):
        train(checkpoint, target, _run(tmp_path / "out", resume=True), texts, _Silent())


def test_no_file_of_others_is_replaced(tmp_path: Path):
    require_run_directory(tmp_path / "new", resume=False)
    (tmp_path / "own/texts").mkdir(parents=True)
    (tmp_path / "own/training").mkdir()
    require_run_directory(tmp_path / "own", resume=False)  # it ended before it had a state
    (tmp_path / "own/README.md").write_text("mine", encoding="utf-8")
    with pytest.raises(RequestError, match=r"is not empty \(it holds README.md\); give a new directory"):
        require_run_directory(tmp_path / "own", resume=False)


def test_no_training_to_go_on_with_is_told(target: PlainTarget, texts, tiny_model: Path, tmp_path: Path):
    with pytest.raises(RequestError, match="has no training state to resume; leave out --resume"):
        train(open_checkpoint(tiny_model), target, _run(tmp_path / "out", resume=True), texts, _Silent())
    assert not (tmp_path / "out").exists()


def test_it_begins_with_weights_that_were_trained_before(
    target: PlainTarget, texts, tiny_model: Path, tmp_path: Path
):
    checkpoint = open_checkpoint(tiny_model)
    train(checkpoint, target, _run(tmp_path / "first"), texts, _Silent())
    run = _run(tmp_path / "second", begin=tmp_path / "first", steps=0)
    train(checkpoint, target, run, texts, _Silent())
    first, second = (read_weights(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    for name, tensor in first.items():
        assert torch.equal(second[name], tensor), name


def test_the_weights_that_it_begins_with_are_measured_before_the_first_step(
    target: PlainTarget, texts, tiny_model: Path, tmp_path: Path
):
    checkpoint = open_checkpoint(tiny_model)
    first = train(checkpoint, target, _run(tmp_path / "first"), texts, _Silent())
    run = _run(tmp_path / "second", begin=tmp_path / "first", steps=4)
    last = train(checkpoint, target, run, texts, _Silent())
    assert first is not None and last is not None
    taus = [entry for entry in _logged(run) if "tau" in entry]
    assert [(entry["step"], entry["set"]) for entry in taus] == [(0, HELD_OUT), (4, HELD_OUT)]
    assert taus[0]["tau"] == pytest.approx(
        first[HELD_OUT].tau(), rel=0.1
    )  # the files are rounded to bfloat16
    assert taus[1]["tau"] == last[HELD_OUT].tau()
    again = replace(run, resume=True)
    train(checkpoint, target, again, texts, _Silent())
    assert [entry["step"] for entry in _logged(run) if "tau" in entry] == [0, 4, 8]


def test_sampled_texts_are_measured_where_no_greedy_ones_are_held_out(tmp_path: Path):
    def text(prompt: int, temperature: float, held_out: bool) -> Document:
        return replace(make_document([prompt, 8, 9, 9], [(2, 4)], "x", temperature), held_out=held_out)

    write_shard(tmp_path, [text(1, 0.7, True), text(2, 0.5, True), text(3, 0.7, False), text(4, 0.0, False)])
    texts = gather_texts(tmp_path, [], lambda _: [], 256, "tiny")
    assert [document.tokens[0] for document in texts.measured[HELD_OUT]] == [1, 2]
    assert [document.tokens[0] for document in texts.trained] == [3, 4]
    write_shard(tmp_path, [text(5, 0.0, True)])
    texts = gather_texts(tmp_path, [], lambda _: [], 256, "tiny")
    assert [document.tokens[0] for document in texts.measured[HELD_OUT]] == [5]


def _logged(run: TrainRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.log.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("bits", [8, 4])
def test_it_begins_with_a_rounded_head(
    bits: int, target: PlainTarget, texts, tiny_model: Path, tmp_path: Path
):
    checkpoint = open_checkpoint(tiny_model)
    train(checkpoint, target, _run(tmp_path / "first"), texts, _Silent())
    wide = read_weights(tmp_path / "first" / "model.safetensors")
    (tmp_path / "small").mkdir()
    save_file(_rounded(wide, bits), tmp_path / "small" / "model.safetensors")
    train(checkpoint, target, _run(tmp_path / "second", begin=tmp_path / "small", steps=0), texts, _Silent())
    second = read_weights(tmp_path / "second" / "model.safetensors")
    assert second.keys() == wide.keys()
    for name, tensor in wide.items():
        close = (0.02 if bits == 8 else 0.08) * float(tensor.float().abs().max())
        assert (second[name].float() - tensor.float()).abs().max() <= close, name


def test_too_little_disk_is_told_before_training(
    target: PlainTarget, texts, tiny_model, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(RequestError, match="MB free; make room"):
        train(open_checkpoint(tiny_model), target, _run(tmp_path / "out"), texts, _Silent())


def test_texts_of_a_larger_vocabulary_are_told(target: PlainTarget, texts, tiny_model: Path, tmp_path: Path):
    strange = make_document([5, 6, target.config.vocab_size, 9], [(2, 4)], "x", 0.0)
    more = replace(texts, trained=[*texts.trained, strange])
    with pytest.raises(RequestError, match="the texts have token id 360, but the model's largest is 359"):
        train(open_checkpoint(tiny_model), target, _run(tmp_path / "out"), more, _Silent())


def test_prompts_that_are_measured_on_are_never_trained_on(tmp_path: Path):
    shared, own = [5, 6], [7, 8]
    documents = [make_document([*prompt, 9, 9], [(2, 4)], "x", 0.0) for prompt in (shared, own, own)]
    write_shard(tmp_path, [replace(document, held_out=False) for document in documents])
    asked: list[int] = []

    def answer(prompts) -> list[Document]:
        asked.append(len(prompts))
        return [make_document([*shared, 9, 9], [(2, 4)], "file", 0.0)]

    for _ in range(2):
        texts = gather_texts(tmp_path, [FilePrompt("file", ("x",))], answer, 256, "tiny")
        assert [document.tokens[0] for document in texts.trained] == [7, 7]
        assert len(texts.measured[FILES]) == 1 and texts.left_out == 1
    assert asked == [1]  # answered once, kept for the next run
    with pytest.raises(RequestError, match="no training texts"):
        gather_texts(tmp_path / "nowhere", [], answer, 256, "tiny")
    write_shard(tmp_path / "few", [replace(documents[0], held_out=True)])
    with pytest.raises(RequestError, match=r"all 1 texts .* are held out for evaluation; write more"):
        gather_texts(tmp_path / "few", [], answer, 256, "tiny")


class _Slow:
    """Time goes by with steps and measurements, and only so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_seconds_of_a_run_include_loading_and_the_last_measurement(
    target: PlainTarget, texts, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock, evaluate, step = _Slow(), Trainer.evaluate, TrainPhase.rate
    clock.now = 10.0  # to load and to write texts

    def measured(trainer: Trainer, documents: list[Document]) -> object:
        clock.now += 4.0
        return evaluate(trainer, documents)

    def stepped(stretch: TrainPhase, number: int) -> float:
        clock.now += 0.25
        return step(stretch, number)

    monkeypatch.setattr(Trainer, "evaluate", measured)
    monkeypatch.setattr(TrainPhase, "rate", stepped)
    run = _run(tmp_path / "out", steps=None, seconds=30.0, began=0.0, clock=clock)
    assert train(open_checkpoint(tiny_model), target, run, texts, _Silent()) is not None
    assert 25.0 < clock.now <= 30.0
    late = replace(run, out=tmp_path / "late", began=clock.now - 30.0)
    with pytest.raises(RequestError, match=r"30 s passed before the first step.*--minutes"):
        train(open_checkpoint(tiny_model), target, late, texts, _Silent())


def test_weights_of_another_kind_are_refused_by_their_files(tmp_path: Path, tiny_model: Path):
    head = TinyHead(360, draft_vocab=200).eagle3().save(tmp_path / "head", draft_vocab_size=200)
    require_same_kind(head, "eagle3")
    with pytest.raises(RequestError, match="holds weights of kind eagle3; train medusa needs"):
        require_same_kind(head, "medusa")
    with pytest.raises(RequestError, match="holds weights of kind draft; train eagle3 needs"):
        require_same_kind(tiny_model, "eagle3")


def test_a_trained_draft_and_exit_are_described(tmp_path: Path, tiny_model: Path):
    found = describe_trained(tiny_model)
    assert (found["method"], found["speculation"]["method"]) == ("draft_model", "draft_model")
    exit_ = shutil.copytree(tiny_model, tmp_path / "exit")
    config = json.loads((exit_ / "config.json").read_text())
    (exit_ / "config.json").write_text(json.dumps({**config, "exit_layer": 3, "exit_of": "big"}))
    found = describe_trained(exit_)
    assert (found["exit_layer"], found["exit_of"]) == (3, "big")
    assert found["speculation"] == {"method": "layer_skip", "adapter": str(exit_)}
    require_same_kind(exit_, "exit")


def test_a_state_with_an_older_name_of_an_option_goes_on(tmp_path: Path):
    recipe = DFlashRecipe(layers=2, draft_tokens=3)
    older = {("guesses" if key == "draft_tokens" else key): value for key, value in asdict(recipe).items()}
    torch.save({"method": "dflash", "recipe": older, "model": None}, tmp_path / "state.pt")
    saved = SavedTraining(tmp_path / "state.pt", torch.device("cpu"))
    saved.check(recipe, None)
    with pytest.raises(RequestError, match="was trained with draft_tokens 3, not 4"):
        saved.check(DFlashRecipe(layers=2, draft_tokens=4), None)
