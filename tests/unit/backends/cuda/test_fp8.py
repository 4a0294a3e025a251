"""Products in 8 bits against torch in float64: on a GPU, or interpreted."""

import logging

import pytest
import torch
from torch import Tensor

from helpers.cuda import KERNEL_DEVICE, has_gpu, needs_cuda, needs_triton

pytestmark = needs_triton

DTYPE = torch.bfloat16 if has_gpu else torch.float32
TOLERANCE = 1e-3 if has_gpu else 1e-5  # sums of 128 products have 14 bits on Hopper


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=KERNEL_DEVICE).to(DTYPE)


def spread(scales: Tensor, shape: tuple[int, ...], in_blocks: bool) -> Tensor:
    """Scales of an input or, with as many of them in both directions, of weights."""
    rows = 128 if in_blocks and len(scales) < shape[0] else 1
    return (
        scales.double()
        .repeat_interleave(rows, 0)[: shape[0]]
        .repeat_interleave(128 if in_blocks else shape[1], 1)[:, : shape[1]]
    )


def rounded(x: Tensor, in_blocks: bool) -> tuple[Tensor, Tensor]:
    """What rounding should give: values and scales, by torch in float32."""
    rows, width = x.shape
    group = 128 if in_blocks else width
    padded = torch.nn.functional.pad(x.float(), (0, -width % group)).view(rows, -1, group)
    largest = padded.abs().amax(-1, keepdim=True)
    # Not 448 / largest, which torch computes as a product with the reciprocal: rounded twice.
    values = (
        (padded * (torch.full_like(largest, 448) / largest)).to(torch.float8_e4m3fn).view(rows, -1)[:, :width]
    )
    return values, (largest / 448).squeeze(-1)


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("width", [72, 256, 300])
def test_rows_are_rounded_to_nearest_with_their_largest_number_kept(width: int, in_blocks: bool):
    from foreword.backends.cuda.kernels.fp8 import Fp8Rows, round_rows

    x = random(3, width)
    x[1] = 0
    found = round_rows(x, Fp8Rows.allocate(x, width, in_blocks))
    values, scales = rounded(x[::2], in_blocks)
    assert torch.equal(found.values[::2].float(), values.float())
    torch.testing.assert_close(found.scales[::2], scales, rtol=1e-6, atol=0)
    assert not found.values[1].float().any()


@pytest.mark.parametrize("in_blocks", [False, True])
def test_norm_and_activation_round_what_they_write(in_blocks: bool):
    from foreword.backends.cuda.kernels.fp8 import Fp8Rows, round_rows
    from foreword.backends.cuda.kernels.rows import activate, add_norm

    stream, weight, gate_up = random(3, 200), random(200), random(3, 400)
    for write in (
        lambda out, allocate: add_norm(stream.clone(), None, weight, 0.1, out, allocate),
        lambda out, allocate: activate(gate_up, out, allocate),
    ):
        plain = write(random(3, 200), None)
        fused = Fp8Rows.allocate(plain, 200, in_blocks)
        assert torch.equal(write(random(3, 200), fused), plain)
        expected = round_rows(plain, Fp8Rows.allocate(plain, 200, in_blocks))
        assert torch.equal(fused.values.view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(fused.scales, expected.scales)


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "sizes", [(1, 64, 128, 128), (5, 150, 300, 300), (33, 130, 512, 256), (20, 70, 72, 72)]
)
def test_products_in_8_bits(sizes: tuple[int, int, int, int], biased: bool, in_blocks: bool):
    """Odd sizes, parts, and outputs full of NaN."""
    from foreword.backends.cuda.kernels.fp8 import FP8, Fp8Rows, Fp8Weight, TmaTile, fp8_linear, round_rows
    from foreword.backends.cuda.kernels.linear import Tile

    rows, columns, depth, part = sizes
    x, values = random(rows, depth), random(columns, depth).to(FP8)
    shape = (-(-columns // 128), -(-depth // 128)) if in_blocks else (columns, 1)
    scales = torch.rand(shape, device=KERNEL_DEVICE) + 0.5
    bias = random(columns) if biased and part == depth else None
    inputs = round_rows(x, Fp8Rows.allocate(x, depth, in_blocks))
    out = torch.full((depth // part, rows, columns), float("nan"), device=KERNEL_DEVICE)
    weight = Fp8Weight(values, scales, in_blocks)
    for tile in (Tile(16, 64, 128), TmaTile(32, 64, 128, stages=2)):
        found = fp8_linear(inputs, weight, bias, out.fill_(float("nan")), tile, part)
        wide = values.double() * spread(scales, values.shape, in_blocks)
        expected = (inputs.values.double() * spread(inputs.scales, x.shape, in_blocks)) @ wide.T
        expected += 0 if bias is None else bias.double()
        assert (found.double().sum(0) - expected).abs().max() < TOLERANCE * expected.abs().max()


def test_a_rounded_matrix_keeps_three_bits_after_the_first():
    from foreword.backends.cuda.packed_products import rounded_weight

    weight = random(40, 96) * torch.logspace(-3, 3, 40, device=KERNEL_DEVICE).to(DTYPE)[:, None]
    found = rounded_weight(weight)
    numbers = found.values.float() * found.scales
    error = (numbers - weight.float()).abs() / weight.float().abs().amax(1, keepdim=True)
    assert error.max() <= 2**-4
    assert found.nbytes == 40 * 96 + 40 * 4


@pytest.mark.parametrize(("columns", "depth", "parts"), [(4096, 14_336, 2), (2048, 2048, 2), (4096, 4160, 1)])
def test_parts_in_8_bits_begin_where_blocks_do(columns: int, depth: int, parts: int):
    from foreword.backends.cuda.kernels.fp8 import Fp8Weight
    from foreword.backends.cuda.products import Products

    values = torch.empty((columns, depth), device="meta")
    assert Products().part_depth(Fp8Weight(values, values)) * parts == depth


def test_products_take_rounded_rows_or_round_them():
    from foreword.backends.cuda.kernels.rows import add_norm
    from foreword.backends.cuda.packed_products import Rows, rounded_weight
    from foreword.backends.cuda.products import Products, added_up

    products, weight, x = Products(least_part=128), rounded_weight(random(40, 256)), random(3, 256)
    allocate = Rows.allocate(x, 256, weight)
    add_norm(x, None, random(256), 0.1, *allocate)
    for found, expected in (
        (products(allocate, weight, None), products(allocate.numbers, weight, None)),
        (products.parts(allocate, weight), products.parts(allocate.numbers, weight)),
    ):
        assert torch.equal(found, expected)
    close = {"rtol": 2e-2, "atol": 2e-2} if has_gpu else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(
        added_up(products.parts(allocate, weight)).to(DTYPE), products(allocate, weight, None), **close
    )


@needs_cuda
@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14_336), (28_672, 4096)])
def test_every_size_of_a_pass_has_the_bits_of_the_reference(shape: tuple[int, int], in_blocks: bool):
    from foreword.backends.cuda.kernels.fp8 import FP8, Fp8Weight
    from foreword.backends.cuda.layout import DECODE_ROWS
    from foreword.backends.cuda.products import Product, Products, added_up

    scales = torch.rand([size // 128 for size in shape] if in_blocks else [shape[0], 1], device=KERNEL_DEVICE)
    weight = Fp8Weight(random(*shape).to(FP8), scales, in_blocks)
    products, x = Products(), random(1024, shape[1])
    products.check_library([Product(weight), Product(weight, is_split=True)])
    assert not products._packed._unusable
    whole = products(x, weight, None)
    total = added_up(products.parts(x, weight)) if products.splits(weight) else None
    for rows in (*DECODE_ROWS, 512, 768):
        assert torch.equal(products(x[:rows], weight, None), whole[:rows]), rows
        if total is not None:
            assert torch.equal(added_up(products.parts(x[:rows], weight)), total[:rows]), rows


def test_a_tile_with_other_bits_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    from foreword.backends.cuda import packed_products
    from foreword.backends.cuda.kernels.linear import Tile

    good, bad, used = Tile(16, 64, 128), Tile(32, 64, 128), []
    right = packed_products.fp8_linear

    def wrong(x, weight, bias, out, tile, depth):
        used.append(tile)
        found = right(x, weight, bias, out, tile, depth)
        return found.add_(1e-3) if tile is bad else found

    monkeypatch.setattr(packed_products, "fp8_linear", wrong)
    monkeypatch.setattr(packed_products, "tile_for", lambda rows, weight: good if rows <= 16 else bad)
    products, weight = packed_products.PackedProducts(), packed_products.rounded_weight(random(64, 64))
    with caplog.at_level(logging.WARNING):
        products.check(weight, 64)
    assert "other bits" in caplog.text
    used.clear()
    for rows in (4, 20):
        products(random(rows, 64), weight, None, random(rows, 64), 64)
    assert used == [good, packed_products.REFERENCE_TILE]
