"""What loading holds besides the packed weights: one short stretch of one matrix, and of a file what was just read."""

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foreword.backends import weight_loader
from foreword.backends.cpu.decoder import load_cpu_decoder
from foreword.backends.cpu.packing import FORMATS
from foreword.backends.torch.weights import load_weights
from foreword.errors import CheckpointError
from foreword.models.formats.checkpoint import Checkpoint, open_checkpoint
from helpers.cpu import needs_cpu_kernels
from helpers.tiny_models import TINY_VOCAB, make_hf_model, write_gguf

STRETCH = 1024  # numbers


class WatchedCheckpoint:
    """Counts what is read of a checkpoint, what of it is still alive, and how often pages are given back."""

    def __init__(self, original: Checkpoint) -> None:
        self._original = original
        self.whole: list[tuple[int, ...]] = []  # shapes of tensors that were loaded at once
        self.alive = self.most_alive = 0  # stretches
        self.largest = 0  # numbers in one
        self.first = ""  # matrix that was read in stretches
        self.read_since_release = self.most_unreleased = 0  # tensors and stretches

    def __getattr__(self, name: str) -> object:
        return getattr(self._original, name)

    def _note_read(self) -> None:
        self.read_since_release += 1
        self.most_unreleased = max(self.most_unreleased, self.read_since_release)

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        loaded = self._original.load(name, dtype)
        self._note_read()
        self.whole.append(tuple(loaded.shape))
        return loaded

    def pieces(self, name: str, dtype: torch.dtype, rows: int) -> Iterator[Tensor]:
        self.first = self.first or name
        for piece in self._original.pieces(name, dtype, rows):
            self._note_read()
            self.largest = max(self.largest, piece.numel())
            self.alive += 1
            self.most_alive = max(self.most_alive, self.alive)
            weakref.finalize(piece, self._note_death)
            yield piece
            del piece

    def _note_death(self) -> None:
        self.alive -= 1

    def release(self) -> None:
        self.read_since_release = 0
        self._original.release()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_model(tmp_path_factory.mktemp("loading") / "model", "llama", tied=True)


@pytest.fixture(params=["directory", "gguf"])
def watched(request, directory: Path) -> WatchedCheckpoint:
    path = directory if request.param == "directory" else directory.parent / "model.gguf"
    if request.param == "gguf" and not path.exists():
        write_gguf(directory, path, "F16")
    return WatchedCheckpoint(open_checkpoint(path))


@needs_cpu_kernels
def test_matrices_are_packed_in_stretches(watched: WatchedCheckpoint, monkeypatch: pytest.MonkeyPatch):
    at_once = load_cpu_decoder(watched, FORMATS["int8"], threads=1)  # type: ignore[arg-type]
    assert watched.largest == TINY_VOCAB * 64  # each of these matrices is one stretch
    assert watched.first == "model.embed_tokens.weight"  # the largest, while little else is in memory
    watched.largest = 0
    monkeypatch.setattr(weight_loader, "_PIECE_ELEMENTS", STRETCH)
    decoder = load_cpu_decoder(watched, FORMATS["int8"], threads=1)  # type: ignore[arg-type]
    assert 0 < watched.largest <= STRETCH
    assert watched.most_alive <= 2  # one is packed while the next is read
    assert watched.most_unreleased == 1
    assert all(len(shape) == 1 for shape in watched.whole)
    isa = decoder.isa
    for matrix, same in zip(matrices(decoder), matrices(at_once), strict=True):
        rows = torch.empty(2, matrix.rows, matrix.cols)
        for row in range(matrix.rows):
            matrix.expand_row(row, rows[0, row], isa)
            same.expand_row(row, rows[1, row], isa)
        assert torch.equal(rows[0], rows[1])


def matrices(decoder) -> list:
    weights = decoder._weights
    layers = (matrix for layer in weights.layers for matrix in (layer.mixing | layer.mlp).values())
    return [weights.embedding, *layers]


def test_the_pages_of_a_file_are_given_back_after_every_tensor(watched: WatchedCheckpoint):
    load_weights(watched, torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
    assert watched.most_unreleased == 1


@needs_cpu_kernels
@pytest.mark.parametrize("shape", [(97, 64), (95, 64), (96, 63)])
def test_a_matrix_of_another_shape_is_refused_with_its_shape(
    watched: WatchedCheckpoint, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    name = "model.layers.1.mlp.up_proj.weight"
    pieces = watched.pieces

    def wrong(wanted: str, dtype: torch.dtype, rows: int) -> Iterator[Tensor]:
        return iter(torch.zeros(shape).split(rows)) if wanted == name else pieces(wanted, dtype, rows)

    monkeypatch.setattr(watched, "pieces", wrong)
    monkeypatch.setattr(weight_loader, "_PIECE_ELEMENTS", STRETCH)
    with pytest.raises(CheckpointError) as refused:
        load_cpu_decoder(watched, FORMATS["int8"], threads=1)  # type: ignore[arg-type]
    assert f"{name} has shape {shape}, its config says (96, 64)" in str(refused.value)
