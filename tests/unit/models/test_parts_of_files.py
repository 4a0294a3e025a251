"""A part of a tensor, read alone, is that part of the whole tensor, whatever the file does with it."""

from pathlib import Path

import pytest
import torch

from foreword.models.formats.checkpoint import ModelFile, TensorPart, open_checkpoint
from helpers.family_gguf import write_family_gguf
from helpers.tiny_families import make_family
from helpers.tiny_models import make_hf_model, write_gguf


def check(file: ModelFile) -> None:
    head = file.config.layers[0].attention.head_dim
    for name in file.tensor_names():
        whole = file.load(name, torch.float32)
        parts = [TensorPart(rows=(head, 2 * head))] if len(whole) >= 2 * head else []
        if whole.dim() == 2:
            parts += [TensorPart(columns=(0, 7)), TensorPart(columns=(9, whole.shape[1]))]
        for part in parts:
            own = file.load_part(name, torch.float32, part)
            assert torch.equal(own, part.of(whole)), name
            assert own.untyped_storage().nbytes() == own.nbytes, name  # nothing of the rest stays
        pieces = list(file.pieces(name, torch.float32, 8))
        assert all(len(piece) <= 8 for piece in pieces), name
        assert torch.equal(torch.cat(pieces), whole), name


@pytest.mark.parametrize("family", ["phi3", "deepseek_v2", "gemma2", "mixtral"])
def test_of_a_directory(family: str, tmp_path: Path):
    """Fused matrices, turned rows, norms less one, experts."""
    check(open_checkpoint(make_family(tmp_path, family)[0]))


@pytest.mark.parametrize("quant", ["F16", "Q8_0"])
def test_of_a_gguf_file(quant: str, tmp_path: Path):
    check(open_checkpoint(write_gguf(make_hf_model(tmp_path, "llama"), tmp_path / "m.gguf", quant)))


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_of_experts_and_latent_rows_in_a_gguf_file(family: str, tmp_path: Path):
    directory, _ = make_family(tmp_path, family)
    check(open_checkpoint(write_family_gguf(family, directory, tmp_path / "m.gguf")))
