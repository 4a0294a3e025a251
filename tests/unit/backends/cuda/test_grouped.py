"""Products with 4-bit codes against torch in float64: on a GPU, or interpreted."""

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.cuda import KERNEL_DEVICE, comparable_numbers, has_gpu, needs_cuda, needs_triton

pytestmark = needs_triton

DTYPE = torch.bfloat16 if has_gpu else torch.float32
FLOATS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def weight_of(kind: str, columns: int, depth: int, group: int) -> tuple[Any, Tensor]:
    """Random codes, and the numbers that they stand for [N, K]."""
    from foreword.backends.cuda.kernels.grouped import E2M1, INT4, INT8, GroupedWeight

    scales, zeros, form = (
        torch.rand(depth // group, columns),
        None,
        {"int8": INT8, "floats": E2M1}.get(kind, INT4),
    )
    if kind == "int8":
        levels = torch.randint(-128, 128, (columns, depth))
        codes, numbers = levels.view(columns, -1, group).to(torch.int8), levels.double()
    else:
        levels = torch.randint(0, 16, (columns, depth))
        halves = levels.view(columns, -1, 2, group // 2)
        codes = (halves[:, :, 0] | halves[:, :, 1] << 4).to(torch.uint8)
        numbers = 2 * FLOATS[levels].double() if kind == "floats" else levels.double() - 8
    if kind == "zeros":
        zeros = torch.randint(0, 17, (depth // group, columns))
        numbers = levels.double() - zeros.T.repeat_interleave(group, 1)
    if kind == "mins":
        numbers = levels.double()
    numbers *= scales.T.repeat_interleave(group, 1)
    mins = torch.rand(depth // group, columns) if kind == "mins" else None
    if mins is not None:
        numbers -= mins.T.repeat_interleave(group, 1)
    on = [part if part is None else part.to(KERNEL_DEVICE) for part in (scales, zeros, mins)]
    stored = codes.transpose(0, 1).contiguous().to(KERNEL_DEVICE)
    byte_zeros = None if on[1] is None else on[1].to(torch.uint8)
    return GroupedWeight(stored, on[0], byte_zeros, None, form, on[2]), numbers.to(KERNEL_DEVICE)


@pytest.mark.parametrize("kind", ["symmetric", "zeros", "floats", "int8", "mins"])
@pytest.mark.parametrize("sizes", [(1, 64, 128, 32, 128), (5, 150, 256, 64, 128), (20, 70, 384, 128, 384)])
def test_products_of_groups(sizes: tuple[int, int, int, int, int], kind: str):
    """Odd sizes, parts, and outputs full of NaN."""
    from foreword.backends.cuda.kernels.grouped import grouped_linear
    from foreword.backends.cuda.kernels.linear import Tile

    rows, columns, depth, group, part = sizes
    weight, numbers = weight_of(kind, columns, depth, group)
    assert weight.shape == (columns, depth) and len(weight) == columns
    x = torch.randn((rows, depth), device=KERNEL_DEVICE).to(DTYPE)
    bias = torch.randn(columns, device=KERNEL_DEVICE).to(DTYPE) if part == depth else None
    for tile in (Tile(16, 64, 128), Tile(32, 64, 128, stages=2)):
        out = torch.full((depth // part, rows, columns), float("nan"), device=KERNEL_DEVICE)
        found = grouped_linear(x, weight, bias, out, tile, part).double().sum(0)
        expected = x.double() @ numbers.T + (0 if bias is None else bias.double())
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_columns_of_another_order_read_their_own_input():
    from dataclasses import replace

    from foreword.backends.cuda.products import Products

    weight, numbers = weight_of("zeros", 64, 128, 32)
    order = torch.randperm(128).to(KERNEL_DEVICE)
    x = comparable_numbers(3, 128, dtype=DTYPE)
    found = Products()(x, replace(weight, order=order.int()), None)
    expected = (x.double()[:, order] @ numbers.T).to(DTYPE)
    assert torch.allclose(found, expected, rtol=1e-2 if has_gpu else 1e-5, atol=1e-2 if has_gpu else 1e-3)


@pytest.mark.parametrize("columns", [96, 128])
def test_a_matrix_rounded_to_4_bits_is_within_half_a_step(columns: int):
    from foreword.backends.cuda.packing import rounded_to_4_bits
    from foreword.backends.cuda.products import Products

    plain = torch.randn((64, columns), device=KERNEL_DEVICE).to(DTYPE)
    weight = rounded_to_4_bits(plain)
    assert weight is not None and rounded_to_4_bits(plain[:, :40].contiguous()) is None
    numbers = Products()(torch.eye(columns, device=KERNEL_DEVICE).to(DTYPE), weight, None).T.float()
    steps = plain.float().view(64, -1, weight.group).abs().amax(-1).repeat_interleave(weight.group, 1) / 7.5
    assert ((numbers - plain.float()).abs() <= 0.52 * steps + 2e-2).all()


@needs_cuda
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "floats", "int8", "mins"])
@pytest.mark.parametrize("group", [32, 128])
def test_every_tile_has_the_bits_of_the_reference(kind: str, group: int):
    from foreword.backends.cuda.layout import DECODE_ROWS
    from foreword.backends.cuda.products import Product, Products, added_up

    weight, _ = weight_of(kind, 2048, 4096, group)
    products, x = Products(), torch.randn((600, 4096), device=KERNEL_DEVICE).bfloat16()
    products.check_library([Product(weight), Product(weight, is_split=True)])
    assert not products._packed._unusable
    whole, parts = products(x, weight, None), added_up(products.parts(x, weight))
    for rows in (*DECODE_ROWS, 300):
        assert torch.equal(products(x[:rows], weight, None), whole[:rows]), rows
        assert torch.equal(added_up(products.parts(x[:rows], weight)), parts[:rows]), rows
