"""Products in tiles of AMX equal those of avx512-vnni bit by bit, whatever the shape."""

import importlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from foreword.backends.cpu.packing import BLOCK_KINDS
from foreword.kernels.native import TILED_ISA, choose_isa, explain_isa
from helpers import kernel_reference as reference
from helpers.cpu import INSTRUCTION_SETS, STATUS, needs_amx, needs_cpu_kernels
from helpers.packed_matrices import arena, product, random, random_blocks

native = importlib.import_module("foreword.kernels._native") if STATUS.available else None

VNNI = "avx512-vnni"
GROUPINGS = [(32, False), (64, False), (96, False), (64, True), (128, True), (192, True)]
COUNTS = [*range(1, 71), 96, 97, 128, 511, 513, 530]
OUTPUTS = [1, 8, 15, 23, 32, 61]
"""From one panel of eight outputs to eight panels; tiles take four panels at a time."""


def assert_equal_bits(matrix, x: torch.Tensor, counts: list[int]):
    for count in counts:
        rows = x[:count].contiguous()
        assert torch.equal(product(matrix, rows, TILED_ISA), product(matrix, rows, VNNI)), count


@needs_amx
@pytest.mark.parametrize(("group", "rotated"), GROUPINGS)
@pytest.mark.parametrize("columns", [31, 192, 1000])
def test_8_bit_products_have_the_same_bits(columns: int, group: int, rotated: bool):
    x = random(max(COUNTS), columns, seed=columns)
    for outputs in OUTPUTS:
        weights = random(outputs, columns, seed=outputs)
        matrix = native.PackedMatrix.round_floats(arena, weights, group, rotated, VNNI, 1)
        matrix.set_bias(random(outputs, seed=3))
        assert_equal_bits(matrix, x, COUNTS)


@needs_amx
@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("columns", [256, 1280])
def test_products_with_blocks_have_the_same_bits(columns: int, kind: str):
    x = random(max(COUNTS), columns, seed=columns)
    for outputs in OUTPUTS:
        matrix = native.PackedMatrix.keep_blocks(arena, kind, random_blocks(kind, outputs, columns), 1)
        assert_equal_bits(matrix, x, COUNTS)


@needs_amx
def test_rows_too_wide_for_one_block_of_tokens_have_the_same_bits():
    columns, outputs = 20_000, 40
    weights, x = random(outputs, columns), random(140, columns, seed=1)
    matrix = native.PackedMatrix.round_floats(arena, weights, 192, True, VNNI, 1)
    assert_equal_bits(matrix, x, [51, 52, 53, 140])
    narrow = native.PackedMatrix.round_floats(arena, weights, 32, False, VNNI, 1)
    assert_equal_bits(narrow, x, [64, 105, 140])


@needs_amx
@pytest.mark.parametrize(("group", "rotated"), [(32, False), (64, True), (128, True), (192, True)])
def test_sums_in_tiles_are_those_of_the_reference(group: int, rotated: bool):
    weights, x = random(23, 577, seed=1), random(70, 577, seed=2)
    matrix = native.PackedMatrix.round_floats(arena, weights, group, rotated, VNNI, 1)
    levels, scales = reference.quantize(weights, group, rotated)
    expected = reference.multiply(levels, scales.half().float(), reference.quantize(x, group, rotated))
    assert torch.equal(product(matrix, x, TILED_ISA), expected)


@needs_amx
def test_levels_of_minus_128_are_multiplied_exactly():
    blocks = random_blocks("Q8_0", 16, 64)
    blocks.reshape(16, 2, 34)[..., 2:] = 0x80  # no quantiser writes it, a file may hold it
    matrix = native.PackedMatrix.keep_blocks(arena, "Q8_0", blocks, 1)
    assert_equal_bits(matrix, random(70, 64), [64, 70])


@needs_amx
def test_every_thread_has_its_own_tiles():
    weights, x = random(61, 576, seed=1), random(70, 576, seed=2)
    matrix = native.PackedMatrix.round_floats(arena, weights, 192, True, VNNI, 1)
    expected = {count: product(matrix, x[:count].contiguous(), VNNI) for count in range(24, 70)}
    with ThreadPoolExecutor(4) as threads:
        counts = list(expected) * 3
        outs = threads.map(lambda count: product(matrix, x[:count].contiguous(), TILED_ISA), counts)
        assert all(torch.equal(out, expected[count]) for out, count in zip(outs, counts, strict=True))


@needs_cpu_kernels
def test_the_choice_of_an_instruction_set_is_explained(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FOREWORD_ISA", raising=False)
    assert explain_isa("avx2") == "the fastest here"
    tiled = explain_isa(TILED_ISA)
    assert f"AMX tiles for {native.MIN_TILED_TOKENS} tokens or more" in tiled
    assert f"with blocks {native.MIN_TILED_BLOCK_TOKENS};" in tiled
    monkeypatch.setenv("FOREWORD_ISA", INSTRUCTION_SETS[-1])
    assert explain_isa(choose_isa(INSTRUCTION_SETS)) == "FOREWORD_ISA names it"
