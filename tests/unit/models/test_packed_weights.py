"""Quantised safetensors in the layouts that people publish are unpacked to the numbers they stand for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.models.formats.checkpoint import TensorPart, open_checkpoint
from helpers.packed_models import SCHEMES, SETTINGS, write_packed


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_matrix_holds_the_numbers_it_stands_for(
    tmp_path: Path, scheme: str, caplog: pytest.LogCaptureFixture
):
    torch.manual_seed(len(scheme))
    numbers = write_packed(tmp_path, scheme)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensor_names() == numbers.keys()
    for name, expected in numbers.items():
        torch.testing.assert_close(checkpoint.load(name, torch.float32), expected.float())
        part = checkpoint.load_part(name, torch.float32, TensorPart(rows=(16, 32)))
        torch.testing.assert_close(part, expected[16:32].float())
    said = [record.getMessage() for record in caplog.records if "unpacked" in record.getMessage()]
    assert len(said) == 1
    assert "GB in bfloat16" in said[0]


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"quant_method": "gptq", "bits": 3}, "GPTQ in 3 bits"),
        ({"quant_method": "gptq"}, "bits is missing"),
        ({"quant_method": "awq", "version": "gemv"}, "gemv"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": 3},
            "config_groups",
        ),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": "x"}, "weight_block_size"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": 4}, "quant_method"),
        ([], "quantization_config"),
    ],
)
def test_schemes_that_are_not_read_are_named(tmp_path: Path, section: Any, words: str):
    write_packed(tmp_path, "gptq")
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS | {"quantization_config": section or [1]}))
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "part", "damage"),
    [
        ("gptq", "g_idx", lambda tensor: tensor + 1000),
        ("gptq", "scales", lambda tensor: tensor[:, :-1]),
        ("awq", "qzeros", lambda tensor: tensor[:, :-1]),
        ("compressed int4", "weight_scale", lambda tensor: tensor[:, :1].repeat(1, 5)),
        ("block fp8", "weight_scale_inv", lambda tensor: tensor[:1]),
        ("mxfp4", "weight_packed", lambda tensor: tensor.float()),
    ],
)
def test_damaged_parts_are_one_line(
    tmp_path: Path, scheme: str, part: str, damage: Callable[[Tensor], Tensor]
):
    from safetensors.torch import load_file

    write_packed(tmp_path, scheme)
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj"
    stored = load_file(file)
    stored[f"{name}.{part}"] = damage(stored[f"{name}.{part}"]).contiguous()
    save_file(stored, file)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight cannot be read") as caught:
        open_checkpoint(tmp_path).load(f"{name}.weight", torch.float32)
    assert "\n" not in str(caught.value)
