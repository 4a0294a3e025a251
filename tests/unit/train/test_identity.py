"""A model is the same one in every file."""

from pathlib import Path

from foreword.models.formats.checkpoint import open_checkpoint
from foreword.train.files import identity_of
from helpers.tiny_models import write_gguf


def test_a_model_is_the_same_in_every_file(tiny_model: Path, tmp_path: Path):
    write_gguf(tiny_model, tmp_path / "model.gguf", "Q8_0")
    first, second = (identity_of(open_checkpoint(path)) for path in (tiny_model, tmp_path / "model.gguf"))
    assert first == second
