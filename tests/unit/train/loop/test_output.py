"""What was trained: whole directories, pieces that can be carried, and the way back."""

import json
from pathlib import Path

import pytest
import torch

from foreword.errors import CheckpointError, RequestError
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.train import files as train_files
from foreword.train.files import identity_of
from foreword.train.heads.decoders import DraftRecipe
from foreword.train.heads.eagle3 import Eagle3Recipe
from foreword.train.heads.learner import LearnedFiles
from foreword.train.heads.medusa import MedusaRecipe
from foreword.train.loop import output
from foreword.train.loop.output import digest_of, join_pieces, read_weights, write_output, write_pieces
from foreword.train.passes.plain_target import PlainTarget
from foreword.train.texts.documents import Document
from helpers.tiny_training import new_learner

_BORROWING = Eagle3Recipe(draft_vocab=64, intermediate=64, own_output=False)


@pytest.mark.parametrize(
    ("recipe", "bits", "error"),
    [
        (DraftRecipe(layers=1), 16, 0.0),
        (DraftRecipe(layers=1), 8, 0.02),
        (MedusaRecipe(heads=2, draft_vocab=64), 16, 0.0),
        (MedusaRecipe(heads=2, draft_vocab=64), 8, 0.02),
        (MedusaRecipe(heads=2, draft_vocab=64), 4, 0.08),
        (_BORROWING, 16, 0.0),
        (_BORROWING, 4, 0.08),
    ],
)
def test_pieces_become_the_directory_again(
    recipe,
    bits: int,
    error: float,
    target: PlainTarget,
    documents: list[Document],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch,
):
    monkeypatch.setattr(output, "PIECE_BYTES", 10_000)
    checkpoint = open_checkpoint(tiny_model)
    digest = write_output(tmp_path / "whole", new_learner(recipe, target, documents).files(checkpoint, 3))
    (tmp_path / "whole" / "README.md").write_text(f"SHA-256 `{digest}`.", encoding="utf-8")
    paths = write_pieces(tmp_path / "whole", tmp_path / "pieces", bits=bits)
    assert len(paths) > 2 and all(path.stat().st_size <= 10_000 for path in paths[:-1])
    join_pieces(tmp_path / "pieces", tmp_path / "again", checkpoint)
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert names == {path.name for path in (tmp_path / "again").iterdir()}
    card = (tmp_path / "again" / "README.md").read_text(encoding="utf-8")
    assert f"`{digest_of(tmp_path / 'again' / 'model.safetensors')}`" in card
    wanted, found = (read_weights(tmp_path / name / "model.safetensors") for name in ("whole", "again"))
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        close = error * float(tensor.float().abs().max()) if name != "lm_head.weight" else 0.0
        torch.testing.assert_close(found[name].float(), tensor.float(), rtol=0, atol=close)


def test_pieces_that_are_missing_or_changed_are_refused(
    target: PlainTarget, documents: list[Document], tiny_model: Path, tmp_path: Path
):
    checkpoint = open_checkpoint(tiny_model)
    learner = new_learner(MedusaRecipe(heads=1, draft_vocab=64), target, documents)
    write_output(tmp_path / "whole", learner.files(checkpoint, 3))
    piece = write_pieces(tmp_path / "whole", tmp_path / "pieces")[0]
    data = piece.read_bytes()
    piece.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(RequestError, match="are damaged, or"):
        join_pieces(tmp_path / "pieces", tmp_path / "again", checkpoint)
    piece.unlink()
    with pytest.raises(RequestError, match="is missing; copy all pieces"):
        join_pieces(tmp_path / "pieces", tmp_path / "again", checkpoint)
    with pytest.raises(RequestError, match=r"no valid pieces\.json"):
        join_pieces(tmp_path, tmp_path / "again", checkpoint)
    assert not (tmp_path / "again").exists()


def test_pieces_are_not_joined_with_another_model(
    target: PlainTarget, documents: list[Document], tiny_model: Path, tmp_path: Path
):
    checkpoint = open_checkpoint(tiny_model)
    learner = new_learner(MedusaRecipe(heads=1, draft_vocab=64), target, documents)
    write_output(tmp_path / "whole", learner.files(checkpoint, 3))
    write_pieces(tmp_path / "whole", tmp_path / "pieces", model="another")
    with pytest.raises(RequestError, match="trained for another model; name it by --model"):
        join_pieces(tmp_path / "pieces", tmp_path / "again", checkpoint)
    write_pieces(tmp_path / "whole", tmp_path / "pieces", model=identity_of(checkpoint))
    join_pieces(tmp_path / "pieces", tmp_path / "again", checkpoint)
    (tmp_path / "pieces" / "pieces.json").write_text("[]")
    with pytest.raises(RequestError, match=r"no valid pieces\.json"):
        join_pieces(tmp_path / "pieces", tmp_path / "more", checkpoint)


def test_pieces_for_another_model_leave_nothing(tiny_model: Path, tmp_path: Path):
    write_output(tmp_path / "whole", LearnedFiles({}, {"a": torch.zeros(2)}, borrowed=frozenset({"b"})))
    write_pieces(tmp_path / "whole", tmp_path / "pieces")
    with pytest.raises(CheckpointError, match="tensor b is missing"):
        join_pieces(tmp_path / "pieces", tmp_path / "again", open_checkpoint(tiny_model))
    assert not (tmp_path / "again").exists()


def test_the_same_weights_are_the_same_file(tmp_path: Path):
    names = [chr(ord("a") + number) for number in range(12)]
    train_files.write_tensors(tmp_path / "w", {"t": torch.arange(3)}, dict.fromkeys(names, "ß"))
    data = (tmp_path / "w").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert list(header["__metadata__"]) == names
    assert read_weights(tmp_path / "w")["t"].tolist() == [0, 1, 2]


def test_pieces_go_where_nothing_else_is(tmp_path: Path, monkeypatch):
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    write_output(whole, LearnedFiles({}, {"a": torch.zeros(400)}))
    monkeypatch.setattr(output, "PIECE_BYTES", 500)
    assert len(write_pieces(whole, pieces)) > 3
    monkeypatch.setattr(output, "PIECE_BYTES", 1000)
    assert set(write_pieces(whole, pieces)) == set(pieces.iterdir())  # none of the earlier ones is left
    with pytest.raises(RequestError, match="is the directory of the training itself"):
        write_pieces(whole, whole)
    (pieces / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(RequestError, match="are not pieces of"):
        write_pieces(whole, pieces)
    (pieces / "pieces.json").unlink()
    with pytest.raises(RequestError, match="are not pieces of"):
        write_pieces(whole, pieces)
    assert (pieces / "model.safetensors").read_bytes() == b"mine"


def test_a_directory_that_was_not_finished_has_no_config(tmp_path: Path, monkeypatch):
    old = LearnedFiles({"old": True}, {"a": torch.zeros(2)})
    write_output(tmp_path, old)

    def broken(*_args: object) -> None:
        (tmp_path / "model.safetensors.part").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(train_files, "save_file", broken)
    with pytest.raises(RequestError, match="No space left"):
        write_output(tmp_path, LearnedFiles({"new": True}, {"a": torch.ones(2)}))
    assert not (tmp_path / "config.json").exists()
    assert not list(tmp_path.glob("*.part"))
