"""Every way of computing a product gives the same bits: for all numbers on a GPU, for exact sums interpreted."""

import pytest
import torch
from torch import Tensor

from helpers.cuda import comparable_numbers, has_gpu, needs_cuda, needs_triton

pytestmark = needs_triton

DTYPE = torch.bfloat16 if has_gpu else torch.float32


def random(*shape: int) -> Tensor:
    return comparable_numbers(*shape, dtype=DTYPE)


@pytest.mark.parametrize(
    ("columns", "depth", "parts"),
    [
        (4096, 14_336, 2),  # down and output of an 8B model
        (4096, 4096, 2),
        (2048, 8192, 4),  # of a 1B model
        (2048, 2048, 2),
        (576, 1536, 1),  # too little to share
        (4096, 14_337, 1),  # no two halves
        (4096, 4128, 2),
        (4096, 4112, 1),  # whose second begins where loads cannot
        (28_672, 4096, 1),  # enough columns
    ],
)
def test_how_often_k_is_cut_is_a_matter_of_the_weights_shape(columns: int, depth: int, parts: int):
    from foreword.backends.cuda.products import Products

    assert Products().part_depth(torch.empty((columns, depth), device="meta")) * parts == depth


@pytest.mark.parametrize("rows", [1, 17, 33, 65])
def test_a_row_of_a_product_in_parts_has_the_same_bits_beside_others(rows: int):
    from foreword.backends.cuda.kernels.linear import linear
    from foreword.backends.cuda.products import REFERENCE_TILE, Products, added_up

    products, weight, x = Products(least_part=32), random(40, 128), random(rows, 128)
    assert products.part_depth(weight) == 32
    found = products.parts(x, weight)
    alone = linear(x[-1:], weight, None, torch.empty((4, 1, 40), device=x.device), REFERENCE_TILE, 32)
    assert torch.equal(found[:, -1:], alone)
    if not has_gpu:
        expected = [k @ w.T for k, w in zip(x.split(32, dim=1), weight.split(32, dim=1), strict=True)]
        assert torch.equal(found, torch.stack(expected))
        assert torch.equal(added_up(found), x @ weight.T)


@pytest.mark.parametrize("biased", [False, True])
def test_products_of_many_rows_add_the_bias(biased: bool, monkeypatch: pytest.MonkeyPatch):
    from foreword.backends.cuda import products

    if not has_gpu:
        monkeypatch.setattr(products, "can_be_tall", lambda *_: True)
    x, weight, bias = random(70, 128), random(48, 128), random(48) if biased else None
    expected = x.float() @ weight.float().T + (0 if bias is None else bias.float())
    found = products.Products()(x, weight, bias).float()
    torch.testing.assert_close(found, expected, rtol=2e-2 if has_gpu else 0, atol=2e-2 if has_gpu else 0)


def test_small_products_are_not_left_to_the_library():
    """Few sums, rounded to 16 bits, can be equal to the kernels' by chance."""
    from foreword.backends.cuda.products import Product, Products

    products, weight = Products(), random(180, 72)
    products.check_library([Product(weight), Product(weight, is_split=True)])
    assert not products._uses_library(random(192, 72), weight, 72)


@pytest.mark.parametrize("biased", [False, True])
def test_the_library_is_checked_with_a_bias_and_without(biased: bool, monkeypatch: pytest.MonkeyPatch):
    """Where it adds a bias in another way, or that was not checked, it computes products without one alone."""
    from foreword.backends.cuda import products as module
    from foreword.backends.cuda.kernels.linear import linear
    from foreword.backends.cuda.products import PROMPT_STEP, REFERENCE_TILE, Product, Products

    def library(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product = linear(x, weight, None, x.new_empty((len(x), len(weight))), REFERENCE_TILE)
        return product if bias is None else product + 2 * bias

    monkeypatch.setattr(module, "LEAST_CHECKED", 0)
    monkeypatch.setattr(module, "LARGEST_CHECKED", 2 * PROMPT_STEP)
    monkeypatch.setattr(module, "DECODE_ROWS", ())
    monkeypatch.setattr(module.functional, "linear", library)
    products, weight, bias, x = Products(), random(16, 32), random(16), random(2 * PROMPT_STEP, 32)
    products.check_library([Product(weight), Product(weight, bias if biased else None)])
    assert products._uses_library(x, weight, 32)
    assert not products._uses_library(x, weight, 32, bias)


@needs_cuda
@pytest.mark.parametrize("shape", [(4096, 14_336), (2048, 8192), (6144, 4096), (28_672, 4096)])
def test_every_size_of_a_pass_has_the_bits_of_the_reference(shape: tuple[int, int]):
    """Whole and in parts, by whichever way a size is computed; the library where the check at the start allows it."""
    from foreword.backends.cuda.kernels.linear import linear
    from foreword.backends.cuda.layout import DECODE_ROWS
    from foreword.backends.cuda.products import REFERENCE_TILE, Product, Products, added_up

    products, weight, most = Products(), random(*shape) * 0.02, 1024
    products.check_library([Product(weight), Product(weight, is_split=True)])
    x, depth = random(most, shape[1]), products.part_depth(weight)
    whole = linear(x, weight, None, x.new_empty((most, shape[0])), REFERENCE_TILE)
    parts = torch.empty((shape[1] // depth, most, shape[0]), device=x.device)
    total = added_up(linear(x, weight, None, parts, REFERENCE_TILE, depth))
    for rows in (*DECODE_ROWS, most):
        assert torch.equal(products(x[:rows], weight, None), whole[:rows]), rows
        if products.splits(weight):
            assert torch.equal(added_up(products.parts(x[:rows], weight)), total[:rows]), rows
