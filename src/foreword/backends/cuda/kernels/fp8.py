"""Matrix products with weights and inputs in 8-bit floats (e4m3).

Both are rounded with scales. Weights have one scale per row of the matrix, or per block of 128 x 128. Inputs have one
per row, or per 128 entries of a row. Sums go over K as in `linear`, so that a row has the same bits in every tile.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from foreword.backends.cuda.kernels.dependent_launch import (
    begin_kernel,
    fetch_to_cache,
    launch_dependents,
    pdl_options,
    wait_for_previous_kernel,
)
from foreword.backends.cuda.kernels.linear import Tile, product_grid, shared_bytes_of
from foreword.kernels.launching import kernel

FP8 = torch.float8_e4m3fn
BLOCK = 128
"""Rows and columns of a block of weights that share a scale, and entries of an input row that share one."""

LARGEST = tl.constexpr(448.0)
"""Largest finite e4m3 number."""

LEAST = tl.constexpr(1e-30)
"""Substitute for the largest number of a row of zeros."""

EXACT_STEP = tl.constexpr(128)
"""Number of products whose sum Hopper's tensor cores hold in 14 bits before they add it to a float32.

The depth of a load is a multiple of it.
"""

FETCHED = tl.constexpr(8)
"""Cache lines of 128 weights per row to prefetch while the previous kernel still runs."""

NEIGHBOURS = 8
"""Column tiles that share the rows of a prompt in the L2 cache."""

PROMPT_ROWS = 128
"""Minimum rows of a tile for the order of `NEIGHBOURS`."""


@dataclass(frozen=True)
class TmaTile(Tile):
    """A tile that the tensor memory accelerator (TMA) loads (Hopper and later)."""


@dataclass(frozen=True)
class Fp8Rows:
    """Rows in 8 bits: the input of a product."""

    values: Tensor  # e4m3 [rows, K]
    scales: Tensor  # float32 [rows, 1]; in blocks, [rows, K / BLOCK]
    in_blocks: bool

    @staticmethod
    def allocate(like: Tensor, depth: int, in_blocks: bool) -> "Fp8Rows":
        """Allocate memory for as many rows as `like` has, to be filled later."""
        scales = -(-depth // BLOCK) if in_blocks else 1
        return Fp8Rows(
            like.new_empty((len(like), depth), dtype=FP8),
            like.new_empty((len(like), scales), dtype=torch.float32),
            in_blocks,
        )


@dataclass(frozen=True)
class Fp8Weight:
    """A matrix in 8 bits."""

    values: Tensor  # e4m3 [N, K]
    scales: Tensor  # float32 [N, 1]; in blocks, [N / BLOCK, K / BLOCK]
    in_blocks: bool = False

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return self.values.shape

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice) -> "Fp8Weight":
        """Return some rows as a view; only for a matrix with a scale per row (not `in_blocks`)."""
        return Fp8Weight(self.values[rows], self.scales[rows])

    @property
    def nbytes(self) -> int:
        """Memory of the numbers and their scales."""
        return self.values.nbytes + self.scales.nbytes


@triton.jit
def store_rounded(
    numbers, values, scales, row, columns, mask, WIDTH: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr
) -> None:
    """Round `numbers`, one row [WIDE] with zeros after WIDTH, and store it with a scale for every GROUP entries."""
    groups: tl.constexpr = WIDE // GROUP
    stored: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    wide = tl.reshape(numbers.to(tl.float32), (groups, GROUP))
    largest = tl.maximum(tl.max(tl.abs(wide), axis=1), LEAST)
    most = tl.full((groups,), LARGEST, dtype=tl.float32)
    rounded = tl.reshape(wide * tl.div_rn(most, largest)[:, None], (WIDE,))
    group = tl.arange(0, groups)
    tl.store(scales + row * stored + group, tl.div_rn(largest, most), mask=group < stored)
    tl.store(values + row * WIDTH + columns, rounded.to(values.dtype.element_ty), mask=mask)


@kernel()
def _round_rows(
    x, values, scales, WIDTH: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr
):
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDE)
    mask = columns < WIDTH
    numbers = tl.load(x + row * WIDTH + columns, mask=mask, other=0.0)
    store_rounded(numbers, values, scales, row, columns, mask, WIDTH, WIDE, GROUP)


def round_rows(x: Tensor, out: Fp8Rows) -> Fp8Rows:
    """Round x [rows, K] to 8 bits, into `out`, and return it."""
    rows, width = x.shape
    wide = padded_width(width, out)
    _round_rows[(rows,)](
        x, *arrays_of(out, x), WIDTH=width, WIDE=wide, GROUP=scale_group(out, wide), num_warps=row_warps(wide),
        **pdl_options(x),
    )  # fmt: skip
    return out


def padded_width(width: int, rounded: Fp8Rows | None) -> int:
    """Return the row width of one program: a power of two, and whole groups."""
    least = BLOCK if rounded is not None and rounded.in_blocks else 1
    return max(least, triton.next_power_of_2(width))


def scale_group(rounded: Fp8Rows | None, wide: int) -> int:
    """Return how many numbers of a row of width `wide` share a scale; 0: rows are not rounded."""
    if rounded is None:
        return 0
    return BLOCK if rounded.in_blocks else wide


def arrays_of(rounded: Fp8Rows | None, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the arrays of values and scales; without rounding twice `other`, which a kernel then does not write."""
    return (other, other) if rounded is None else (rounded.values, rounded.scales)


def row_warps(block: int) -> int:
    """Return the warps of a program that holds a row of this width."""
    if block <= 2048:
        return 4
    return 8 if block <= 8192 else 16


@triton.jit
def _tile_start(num_rows, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Return the first row and column of a program's tile; NEIGHBOURS consecutive programs share rows."""
    of_group = NEIGHBOURS * tl.cdiv(num_rows, ROWS)
    group, in_group = tl.program_id(0) // of_group, tl.program_id(0) % of_group
    width = tl.minimum(tl.cdiv(N, COLUMNS) - group * NEIGHBOURS, NEIGHBOURS)
    return in_group // width * ROWS, (group * NEIGHBOURS + in_group % width) * COLUMNS


@kernel(do_not_specialize=("num_rows",))
def _fp8_linear(
    x, x_scales, weight, scales, bias, y, num_rows, N, K, part_depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, NEIGHBOURS: tl.constexpr,
    TMA: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[part, m, n] = sum over the part's k of x[m, k] weight[n, k], times their scales, + bias[n].

    Weights are the M side of the tensor cores (at least 64 wide). With TMA, x and weight are tensor descriptors. With
    BLOCK > 0, scales are per block.
    """
    # `linear` says why.
    early: tl.constexpr = ROWS > 16
    launch_dependents(PDL and early)
    row, column = _tile_start(num_rows, N, ROWS, COLUMNS, NEIGHBOURS)
    part = tl.program_id(1)
    begin = part * part_depth
    end = tl.minimum(begin + part_depth, K)
    m, n, k = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    row_mask, column_mask = m < num_rows, n < N
    if PDL and FETCHED > 0 and not TMA:
        line = begin + 128 * tl.arange(0, FETCHED)
        fetch_to_cache(
            weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + tl.minimum(line, K - 1)[None, :]
        )
    wait_for_previous_kernel(PDL)
    if not TMA:
        x_at = x + m.to(tl.int64)[:, None] * K + begin + k[None, :]
        weight_at = weight + n.to(tl.int64)[:, None] * K + begin + k[None, :]
    total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    for first in range(begin, end, DEPTH):
        if TMA:
            a, b = x.load([row, first]), weight.load([column, first])
        elif EVEN:
            a = tl.load(x_at, mask=row_mask[:, None], other=0.0)
            b = tl.load(weight_at, mask=column_mask[:, None], other=0.0)
        else:
            inside = (first + k) < end
            a = tl.load(x_at, mask=row_mask[:, None] & inside[None, :], other=0.0)
            b = tl.load(weight_at, mask=column_mask[:, None] & inside[None, :], other=0.0)
        if BLOCK > 0:
            groups = tl.cdiv(K, BLOCK)
            row_scales = tl.load(x_scales + m * groups + first // BLOCK, mask=row_mask, other=0.0)
            column_scales = tl.load(
                scales + n // BLOCK * groups + first // BLOCK, mask=column_mask, other=0.0
            )
            partial = tl.dot(b, tl.trans(a), max_num_imprecise_acc=EXACT_STEP)
            total = tl.fma(partial, column_scales[:, None] * row_scales[None, :], total)
        else:
            total = tl.dot(b, tl.trans(a), total, max_num_imprecise_acc=EXACT_STEP)
        if not TMA:
            x_at += DEPTH
            weight_at += DEPTH
    launch_dependents(PDL and not early)
    addend = tl.zeros((COLUMNS,), dtype=tl.float32)
    if HAS_BIAS:
        addend = tl.load(bias + n, mask=column_mask, other=0.0).to(tl.float32)
    if BLOCK > 0:
        total += addend[:, None]
    else:
        row_scales = tl.load(x_scales + m, mask=row_mask, other=0.0)
        column_scales = tl.load(scales + n, mask=column_mask, other=0.0)
        # An explicit fma, so that the compiler does not choose whether the product is rounded before the bias is added.
        total = tl.fma(
            total, column_scales[:, None] * row_scales[None, :], tl.broadcast_to(addend[:, None], total.shape)
        )
    total = tl.trans(total)
    y_at = y + (part.to(tl.int64) * num_rows + m.to(tl.int64))[:, None] * N + n[None, :]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


def fp8_linear(
    x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, out: Tensor, tile: Tile, part_depth: int | None = None
) -> Tensor:
    """Write the product of x [rows, K] and weight [N, K] to out [rows, N]; in parts as `linear`."""
    (num_rows, depth), columns = x.values.shape, len(weight)
    if out.is_cuda:
        tile = tile.within(shared_bytes_of(out.device.index), 1)
    part_depth = part_depth or depth
    step = BLOCK if weight.in_blocks else tile.depth
    is_even = depth % part_depth == 0 and part_depth % step == 0
    inputs = x.values
    weights = weight.values
    uses_tma = isinstance(tile, TmaTile) and is_even and _can_use_tma(x, weight)
    if uses_tma:
        inputs = TensorDescriptor.from_tensor(inputs, [tile.rows, step])
        weights = TensorDescriptor.from_tensor(weights, [tile.columns, step])
    _fp8_linear[product_grid(num_rows, columns, depth, tile, part_depth)](
        inputs, x.scales, weights, weight.scales, weight.scales if bias is None else bias, out,
        num_rows, columns, depth, part_depth,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=step, BLOCK=BLOCK if weight.in_blocks else 0,
        NEIGHBOURS=NEIGHBOURS if tile.rows >= PROMPT_ROWS else 1, TMA=uses_tma, EVEN=is_even,
        HAS_BIAS=bias is not None,
        num_warps=tile.warps, num_stages=tile.stages, **pdl_options(x.values),
    )  # fmt: skip
    return out


def _can_use_tma(x: Fp8Rows, weight: Fp8Weight) -> bool:
    """Return whether the tensor memory accelerator (TMA) can load these."""
    if x.values.is_cuda and torch.cuda.get_device_capability(x.values.device) < (9, 0):
        return False
    starts = x.values.data_ptr() | weight.values.data_ptr() | x.values.shape[1]
    return starts % 16 == 0
