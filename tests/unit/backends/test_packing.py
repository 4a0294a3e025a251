"""How the matrices of a checkpoint are packed for the CPU kernels."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from foreword.backends.cpu.packing import (
    FORMATS,
    MatrixPacker,
    default_format,
    has_finite_scales,
    resolve_format,
    rotated_group_size,
)
from foreword.errors import CheckpointError
from foreword.models.config import AttentionSpec, LayerSpec, MlpSpec
from foreword.models.formats.checkpoint import QuantizedTensor
from helpers.cpu import INSTRUCTION_SETS, needs_cpu_kernels
from helpers.random_checkpoint import SMOLLM2_SHAPE, RandomCheckpoint

TINY = replace(
    SMOLLM2_SHAPE,
    vocab_size=64,
    hidden_size=128,
    layers=(LayerSpec(AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=64), MlpSpec(96)),),
)
QUERY, KEY, VALUE = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")


def blocks(kind: str, rows: int = 128, columns: int = 128) -> QuantizedTensor:
    values = np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return QuantizedTensor(kind, data, (rows, columns))


def packer(form: str, stored: dict[str, QuantizedTensor]) -> MatrixPacker:
    """Of a file that keeps some matrices in blocks and others in floats."""
    return MatrixPacker(RandomCheckpoint(TINY, stored), FORMATS[form], INSTRUCTION_SETS[0], 1, None)


@needs_cpu_kernels
def test_matrices_of_one_input_are_grouped_alike_where_a_file_stores_them_differently():
    """The input is rounded once, by the groups of the first."""
    packed = packer("stored", {QUERY: blocks("Q4_0"), VALUE: blocks("Q8_0")}).matrices(
        [QUERY, KEY, VALUE], False
    )
    assert [(matrix.format, matrix.group_size) for matrix in packed] == [
        ("q4_0", 32),
        ("int8", 32),
        ("int8", 32),
    ]


@needs_cpu_kernels
def test_blocks_that_are_not_kept_are_rotated_as_floats_are():
    packed = packer("int8", {QUERY: blocks("Q4_0")}).matrices([QUERY, KEY], False)
    assert [(matrix.format, matrix.group_size) for matrix in packed] == [("int8-rotated", 128)] * 2


MLP = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]


@pytest.mark.parametrize(
    ("kind", "isa", "expected"),
    [
        ("Q4_1", "avx512-amx", "stored"),
        ("Q4_1", "avx512-vnni", "stored"),
        ("Q5_0", "avx2", "stored"),
        ("Q8_0", "avx512-vnni", "int8"),  # no fewer bytes
        ("Q4_1", "neon-dotprod", "int8"),
        ("Q4_1", "portable", "int8"),
        (None, "avx512-vnni", "int8"),
    ],
)
def test_auto_follows_a_fixed_rule(kind: str | None, isa: str, expected: str):
    sizes = {MLP[0]: (96, 128), MLP[1]: (96, 128), MLP[2]: (128, 96), VALUE: (128, 128)}
    stored = {} if kind is None else {name: blocks(kind, *size) for name, size in sizes.items()}
    checkpoint = RandomCheckpoint(TINY, stored)
    form, reason = default_format(checkpoint, isa)
    assert form == FORMATS[expected]
    assert reason
    asked = replace(FORMATS["auto"], kv_dtype="float32")
    assert resolve_format(asked, checkpoint, isa) == replace(FORMATS[expected], kv_dtype="float32")
    assert resolve_format(FORMATS["q8_0"], checkpoint, isa) == FORMATS["q8_0"]


def test_a_few_blocks_do_not_decide():
    form, _ = default_format(RandomCheckpoint(TINY, {MLP[0]: blocks("Q4_0", 96)}), "avx2")
    assert form == FORMATS["int8"]


def test_the_rule_reads_the_names_once_however_many_tensors_there_are(monkeypatch: pytest.MonkeyPatch):
    """A checkpoint makes a new set of them in every call, and a mixture has thousands."""
    calls: list[int] = []
    names = RandomCheckpoint.tensor_names

    def counted(checkpoint: RandomCheckpoint) -> frozenset[str]:
        calls.append(1)
        return names(checkpoint)

    monkeypatch.setattr(RandomCheckpoint, "tensor_names", counted)
    default_format(RandomCheckpoint(TINY, {MLP[0]: blocks("Q4_0", 96)}), "avx2")
    assert len(calls) == 1


@needs_cpu_kernels
def test_blocks_of_another_shape_are_refused_by_name():
    with pytest.raises(CheckpointError, match=rf"tensor {KEY} has shape \(64, 128\)"):
        packer("int8", {KEY: blocks("Q8_0", rows=64)}).matrices([QUERY, KEY], False)


@pytest.mark.parametrize(
    ("columns", "group"), [(64, 64), (128, 128), (192, 192), (576, 192), (640, 128), (1536, 192)]
)
def test_a_rotated_matrix_has_the_fewest_scales_without_more_padding(columns: int, group: int):
    assert rotated_group_size(columns) == group


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        ("Q8_0", [0]),
        ("Q4_0", [0]),
        ("Q4_1", [0, 2]),
        ("Q5_0", [0]),
        ("Q5_1", [0, 2]),
        ("Q4_K", [0, 2]),
        ("Q5_K", [0, 2]),
        ("Q6_K", [208]),
    ],
)
def test_a_block_is_damaged_by_each_of_its_numbers(kind: str, places: list[int]):
    columns, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    sound = QuantizedTensor(kind, np.zeros((4, 2 * size), np.uint8), (4, 2 * columns))
    assert has_finite_scales(sound)
    for place in places:
        data = sound.data.copy()
        data[3, size + place : size + place + 2] = torch.tensor([torch.inf]).half().numpy().view(np.uint8)
        assert not has_finite_scales(replace(sound, data=data))
