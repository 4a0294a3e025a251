"""Every kernel equals its reference in plain torch, on every instruction set that this CPU has."""

import importlib

import gguf
import numpy as np
import pytest
import torch

from foreword.backends.cpu.packing import BLOCK_KINDS
from foreword.kernels.sampler import floors
from helpers import kernel_reference as reference
from helpers.cpu import INSTRUCTION_SETS, STATUS, needs_cpu_kernels
from helpers.packed_matrices import arena, product, random, random_blocks

pytestmark = needs_cpu_kernels
native = importlib.import_module("foreword.kernels._native") if STATUS.available else None

UGLY_SHAPES = [
    (1, 1),
    (3, 31),
    (8, 32),
    (9, 33),
    (15, 65),
    (16, 64),
    (63, 192),
    (65, 200),
    (24, 577),
    (40, 1000),
]
ROW_COUNTS = [1, 2, 3, 4, 5, 7, 8, 13, 63, 64, 65, 15, 16, 17, 26, 130]
GROUPINGS = [(32, False), (64, False), (64, True), (128, True), (192, True)]


def close(ours: torch.Tensor, expected: torch.Tensor):
    # Without hardware fma the portable path rounds products by themselves.
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max() + 1e-30))


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize(("group", "rotated"), GROUPINGS)
@pytest.mark.parametrize("count", [1, 7, 32, 64, 100, 192, 193, 576])
def test_quantised_rows_equal_the_reference(count: int, group: int, rotated: bool, isa: str):
    x = random(1, count, seed=count)
    groups = -(-count // group)
    q, scale, total = torch.empty(groups * group, dtype=torch.int8), torch.empty(groups), torch.empty(groups)
    native.quantize(x[0], group, rotated, q, scale, total, isa)
    levels, scales = reference.quantize(x, group, rotated)
    assert torch.equal(q.float(), levels.flatten())
    assert torch.equal(scale, scales[0])
    assert torch.equal(total, scale * levels[0].sum(-1))


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize(("group", "rotated"), GROUPINGS)
@pytest.mark.parametrize(("rows", "columns"), UGLY_SHAPES)
def test_8_bit_products_equal_the_reference(rows: int, columns: int, group: int, rotated: bool, isa: str):
    weights = random(rows, columns, seed=rows) / 10
    bias = random(rows, seed=1)
    matrix = native.PackedMatrix.round_floats(arena, weights, group, rotated, isa, 2)
    matrix.set_bias(bias)
    levels, scales = reference.quantize(weights, group, rotated)
    for count in (1, 3, 5, 63):
        x = random(count, columns, seed=count)
        expected = (
            reference.multiply(levels, scales.half().float(), reference.quantize(x, group, rotated)) + bias
        )
        close(product(matrix, x, isa), expected)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("step", [8, 16, 40])
def test_a_matrix_rounded_in_stretches_is_the_one_rounded_at_once(step: int, isa: str):
    weights = random(37, 200)
    matrix = native.PackedMatrix.zeros_int8(arena, 37, 200, 64, True)
    for first in range(0, 37, step):
        matrix.round_rows(first, weights[first : first + step], isa, 3)
    at_once = native.PackedMatrix.round_floats(arena, weights, 64, True, isa, 1)
    assert torch.equal(expanded(matrix, isa), expanded(at_once, isa))
    x = random(5, 200, seed=1)
    assert torch.equal(product(matrix, x, isa), product(at_once, x, isa))


def test_rows_that_do_not_fit_a_matrix_are_refused():
    matrix, isa = native.PackedMatrix.zeros_int8(arena, 16, 64, 64, True), INSTRUCTION_SETS[0]
    for first, rows, columns in ((4, 8, 64), (8, 9, 64), (-8, 8, 64), (0, 8, 63)):
        with pytest.raises(ValueError, match="do not fit the matrix"):
            matrix.round_rows(first, torch.zeros(rows, columns), isa, 1)
    floats = native.PackedMatrix.keep_floats(arena, torch.zeros(8, 64))
    with pytest.raises(ValueError, match="do not fit the matrix"):
        floats.round_rows(0, torch.zeros(8, 64), isa, 1)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (9, 512), (64, 768), (23, 1536)])
def test_products_with_gguf_blocks_equal_the_reference(rows: int, columns: int, kind: str, isa: str):
    blocks = random_blocks(kind, rows, columns)
    exact = weights_of(kind, blocks)
    matrix = native.PackedMatrix.keep_blocks(arena, kind, blocks, 2)
    assert torch.equal(expanded(matrix, isa), exact)
    for count in ROW_COUNTS[:9]:
        x = random(count, columns, seed=count)
        levels, scales = reference.quantize(x, 32, False)
        inputs = (levels.double() * scales.double().unsqueeze(-1)).flatten(1)
        expected = (inputs @ exact.double().T).float()
        close(product(matrix, x, isa), expected)
    again = native.PackedMatrix.round_blocks(arena, kind, blocks, 32, False, isa, 2)
    from_floats = native.PackedMatrix.round_floats(arena, exact, 32, False, isa, 1)
    assert torch.equal(expanded(again, isa), expanded(from_floats, isa))


def weights_of(kind: str, blocks: np.ndarray) -> torch.Tensor:
    if kind != "Q4_Z":
        return torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]))
    parts = blocks.reshape(len(blocks), -1, 19)
    scales, zeros = (
        parts[..., :2].copy().view(np.float16).astype(np.float32),
        parts[..., 2:3].astype(np.float32),
    )
    levels = np.concatenate([parts[..., 3:] & 15, parts[..., 3:] >> 4], axis=-1)
    return torch.from_numpy(scales * (levels - zeros)).flatten(1)


def expanded(matrix, isa: str) -> torch.Tensor:
    out = torch.empty(matrix.rows, matrix.cols)
    for row in range(matrix.rows):
        matrix.expand_row(row, out[row], isa)
    return out


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize(("rows", "columns"), UGLY_SHAPES)
def test_float_products_and_rows(rows: int, columns: int, isa: str):
    weights = random(rows, columns, seed=rows)
    matrix = native.PackedMatrix.keep_floats(arena, weights)
    assert torch.equal(expanded(matrix, isa), weights)
    x = random(7, columns, seed=2)
    torch.testing.assert_close(product(matrix, x, isa), x @ weights.T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize(("group", "rotated"), GROUPINGS)
def test_rows_of_rounded_matrices_come_back_within_half_a_step(group: int, rotated: bool, isa: str):
    weights = random(19, 200, seed=4)
    matrix = native.PackedMatrix.round_floats(arena, weights, group, rotated, isa, 1)
    back = reference.grouped(expanded(matrix, isa), group, rotated)
    exact = reference.grouped(weights, group, rotated)
    if rotated and group != 64:  # the zeros behind the row were turned too, and cut off again
        back, exact = back[:, :-1], exact[:, :-1]
    step = exact.abs().amax(-1, keepdim=True) / 127
    kept = slice(None) if not rotated else slice(0, -1)
    assert ((back - exact).abs() <= 0.6 * step)[:, kept].all()


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("form", ["int8", "rotated", "float", *BLOCK_KINDS])
def test_a_row_does_not_depend_on_its_neighbours(form: str, isa: str):
    weights = random(61, 256, seed=1)
    x = random(130, 256, seed=3)
    if form == "float":
        matrix = native.PackedMatrix.keep_floats(arena, weights)
    elif form.startswith("Q"):
        matrix = native.PackedMatrix.keep_blocks(arena, form, random_blocks(form, 61, 256), 1)
    else:
        matrix = native.PackedMatrix.round_floats(arena, weights, 64, form == "rotated", isa, 1)
    alone = torch.cat([product(matrix, row.unsqueeze(0), isa) for row in x])
    for count in ROW_COUNTS:
        for start in (0, 130 - count):
            rows = slice(start, start + count)
            assert torch.equal(product(matrix, x[rows].contiguous(), isa), alone[rows])


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("count", [2, 20])
def test_extreme_values_neither_saturate_nor_vanish(count: int, isa: str):
    weights, x = torch.ones(17, 192), torch.full((count, 192), 5.0)
    step = torch.full((count, 17), float(np.float16(1 / 127)))
    for sign in (1.0, -1.0):
        matrix = native.PackedMatrix.round_floats(arena, weights * sign, 192, False, isa, 1)
        close(product(matrix, x, isa), 127 * 192 * 5 * sign * step)
    blocks = gguf.quants.quantize(weights.numpy(), gguf.GGMLQuantizationType.Q8_0)
    blocks.reshape(17, 6, 34)[..., 2:] = 0x80  # -128: no quantiser writes it, a file may hold it
    matrix = native.PackedMatrix.keep_blocks(arena, "Q8_0", blocks, 1)
    close(product(matrix, -x, isa), 128 * 192 * 5 * step)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("count", [5, 20])
def test_a_number_that_is_none_spoils_its_own_row_only(count: int, bad: float, isa: str):
    x = random(count, 96)
    x[2, 40] = bad
    out = product(native.PackedMatrix.round_floats(arena, random(19, 96), 32, False, isa, 1), x, isa)
    assert not out[2].isfinite().any()
    assert out[[row for row in range(count) if row != 2]].isfinite().all()


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("count", [1, 3, 7, 8, 9, 20, 63, 576])
def test_norm_and_activation_equal_the_reference(count: int, isa: str):
    x, weight = random(count, seed=count), random(count, seed=1)
    out = torch.empty(count)
    native.rms_norm(x, weight, 1e-5, out, isa)
    torch.testing.assert_close(out, reference.rms_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-6)
    gate = x.clone()
    native.silu_mul(gate, weight, isa)
    torch.testing.assert_close(gate, reference.silu_mul(x, weight), rtol=1e-5, atol=1e-6)


def test_shapes_and_kinds_that_cannot_be_packed_are_refused():
    matrix = native.PackedMatrix.keep_floats(arena, torch.zeros(3, 4))
    with pytest.raises(ValueError, match="shapes"):
        matrix.multiply(torch.zeros(2, 5), torch.zeros(2, 3), INSTRUCTION_SETS[0])
    with pytest.raises(ValueError, match="bias"):
        matrix.set_bias(torch.zeros(4))
    with pytest.raises(ValueError, match="Q2_K"):
        native.PackedMatrix.keep_blocks(arena, "Q2_K", np.zeros((1, 84), np.uint8), 1)
    with pytest.raises(ValueError, match="whole number"):
        native.PackedMatrix.keep_blocks(arena, "Q4_0", np.zeros((1, 17), np.uint8), 1)
    with pytest.raises(ValueError, match="group size"):
        native.PackedMatrix.round_floats(arena, torch.zeros(1, 64), 96, True, INSTRUCTION_SETS[0], 1)
    with pytest.raises(ValueError, match="instruction set"):
        native.PackedMatrix.round_floats(arena, torch.zeros(1, 64), 64, True, "mmx", 1)


def test_a_nucleus_that_unlikely_tokens_decide_counts_all_of_them():
    """Chunks too unlikely to be in the nucleus are left out at first: here their mass is what lets a token in."""
    vocab, top_p = 4096, 0.9
    logits = torch.full((1, vocab), float(np.log((1 - top_p) / vocab) - 1.05))
    logits[0, :32] = -torch.inf
    logits[0, 3], logits[0, 9] = 0.0, float(np.log(0.095))
    temperature, top_k = torch.ones(1, dtype=torch.float64), torch.tensor([vocab])
    shape = (
        temperature,
        top_k,
        torch.tensor([top_p], dtype=torch.float64),
        torch.zeros(1, dtype=torch.float64),
    )
    _, floor, _ = floors(native.Sampler(1), logits, *shape)
    total = logits.double().exp().sum()
    assert top_p * total > 1 >= top_p * 1.095, "the likeliest token is all of it without the others"
    assert floor.item() == logits[0, 9].item()


def test_the_reference_divides_as_the_kernels_do():
    # torch's `127 / x` rounds twice: a value that is nearly halfway between two levels would take the other one.
    largest = random(64, 256, 1).abs()
    halfway = largest * (torch.arange(31) + 0.5) / 127
    x = torch.cat((largest, halfway), -1)
    levels, _ = reference.quantize(x.flatten(1), 32, False)
    assert np.array_equal(levels, np.rint(x.numpy() * (np.float32(127) / largest.numpy())))
