"""Weights with NaN or infinity are refused when they are loaded: no other numbers would mend them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foreword.engine.loader import load_model
from foreword.errors import CheckpointError
from helpers.cpu import needs_cpu_kernels
from helpers.tiny_models import make_hf_model, write_gguf

NAME = "model.layers.1.mlp.down_proj.weight"


def damaged(directory: Path, value: float) -> Path:
    path = make_hf_model(directory, "llama", tied=True)
    weights = load_file(path / "model.safetensors")
    weights[NAME][3, 40] = value
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def refusal(path: Path, backend: str, dtype: str = "auto") -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(str(path), device="cpu", backend=backend, dtype=dtype)
    return str(caught.value)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_cpu_kernels)])
def test_in_a_directory(tmp_path: Path, backend: str, value: float):
    message = refusal(damaged(tmp_path, value), backend)
    assert NAME in message
    assert "dtype" not in message


@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (64, 97), (65, 96), (2, 3, 4)])
@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_cpu_kernels)])
def test_a_matrix_of_another_shape(tmp_path: Path, backend: str, shape: tuple[int, ...]):
    path = make_hf_model(tmp_path, "llama", tied=True)
    weights = load_file(path / "model.safetensors")
    weights[NAME] = torch.ones(shape)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    assert f"{NAME} has shape" in refusal(path, backend)


@needs_cpu_kernels
@pytest.mark.parametrize(
    ("quant", "dtype"), [("Q8_0", "int8"), ("Q4_0", "q4"), ("Q4_1", "q4"), ("Q4_1", "int8")]
)
def test_in_the_scales_of_blocks(tmp_path: Path, quant: str, dtype: str):
    """Only one block of the file is broken, and its levels are whole numbers."""
    sound = make_hf_model(tmp_path / "sound", "llama", tied=True)
    path = write_gguf(sound, tmp_path / "model.gguf", quant)
    load_model(str(path), device="cpu", backend="cpu", dtype=dtype)
    raw = path.read_bytes()
    from foreword.models.formats.gguf.file import GgufFile

    file = GgufFile(path)
    block = bytes(file.rows("blk.1.ffn_down.weight")[5][:18])
    file.release()
    assert raw.count(block) == 1
    path.write_bytes(raw.replace(block, b"\xff\x7f" + block[2:]))  # NaN in half precision
    assert NAME in refusal(path, "cpu", dtype)
