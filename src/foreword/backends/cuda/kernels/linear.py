"""Matrix products for few rows.

K is summed in order, or in parts whose depth depends only on the shape of the weights. So a row's summation order, and
with it its bits, are the same for every tile shape and in any batch.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.cuda.kernels.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_previous_kernel,
)
from foreword.kernels.launching import kernel


@dataclass(frozen=True)
class Tile:
    """Tile sizes of a product. They do not change a bit of the result."""

    rows: int  # of the input
    columns: int  # of the output
    depth: int  # of K, loaded at a time
    warps: int = 4
    stages: int = 3
    swapped: bool = False  # weights are the M side of the tensor cores (at least 64 wide)

    def within(self, shared_bytes: int, number_bytes: int) -> "Tile":
        """Return the tile with stages, and if necessary depth, reduced to fit into shared memory."""
        tile = self
        while tile._shared_bytes(number_bytes) > shared_bytes and tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        while tile._shared_bytes(number_bytes) > shared_bytes and tile.depth > 16:
            tile = replace(tile, depth=tile.depth // 2)
        return tile

    def _shared_bytes(self, number_bytes: int) -> int:
        """Return the bytes of shared memory of all stages except the one being multiplied."""
        return (self.stages - 1) * (self.rows + self.columns) * self.depth * number_bytes


@triton.jit
def product(
    x_at, weight_at, row_mask, column_mask, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, SWAPPED: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the rows at x_at [ROWS] times the weights at weight_at [COLUMNS], each of K entries: [ROWS, COLUMNS]."""
    k = tl.arange(0, DEPTH)
    x_at, weight_at = x_at[:, None] + k[None, :], weight_at[:, None] + k[None, :]
    if SWAPPED:
        total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    else:
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, K, DEPTH):
        if EVEN:
            a = tl.load(x_at, mask=row_mask[:, None], other=0.0)
            b = tl.load(weight_at, mask=column_mask[:, None], other=0.0)
        else:
            inside = (first + k) < K
            a = tl.load(x_at, mask=row_mask[:, None] & inside[None, :], other=0.0)
            b = tl.load(weight_at, mask=column_mask[:, None] & inside[None, :], other=0.0)
        if SWAPPED:
            total = tl.dot(b, tl.trans(a), total, input_precision=PRECISION)
        else:
            total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
        x_at += DEPTH
        weight_at += DEPTH
    if SWAPPED:
        total = tl.trans(total)
    return total


@kernel(do_not_specialize=("num_rows",))
def _linear(
    x, weight, bias, y, num_rows, N, K, part_depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, SWAPPED: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[part, m, n] = sum over the part's k of x[m, k] weight[n, k], + bias[n]."""
    # With few rows, reading weights limits a pass, and programs of the next kernel that already wait slow it down.
    early: tl.constexpr = ROWS > 16
    launch_dependents(PDL and early)
    wait_for_previous_kernel(PDL)
    tiles_of_rows = tl.cdiv(num_rows, ROWS)
    # Neighbouring programs read the same weights, which are then in the cache.
    row_tile = tl.program_id(0) % tiles_of_rows
    column_tile = tl.program_id(0) // tiles_of_rows
    part = tl.program_id(1)
    begin = part * part_depth
    m = row_tile * ROWS + tl.arange(0, ROWS)
    n = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    row_mask = m < num_rows
    column_mask = n < N
    x_at = x + m.to(tl.int64) * K + begin
    weight_at = weight + n.to(tl.int64) * K + begin
    total = product(
        x_at, weight_at, row_mask, column_mask, tl.minimum(part_depth, K - begin),
        ROWS, COLUMNS, DEPTH, EVEN, SWAPPED, PRECISION,
    )  # fmt: skip
    launch_dependents(PDL and not early)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    y_at = y + (part.to(tl.int64) * num_rows + m.to(tl.int64))[:, None] * N + n[None, :]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


def product_grid(num_rows: int, columns: int, depth: int, tile: Tile, part_depth: int) -> tuple[int, int]:
    """Return the programs of a product: tiles of rows and columns, and parts of K."""
    tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(columns, tile.columns)
    return tiles, triton.cdiv(depth, part_depth)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: Tile, part_depth: int | None = None
) -> Tensor:
    """Write the product of x [rows, K] and weight [N, K], plus the bias, to out [rows, N] and return it.

    With `part_depth`, K is divided into parts of this depth, and out is [parts, rows, N]: one product for each part.
    """
    (num_rows, depth), columns = x.shape, len(weight)
    if x.is_cuda:
        tile = tile.within(shared_bytes_of(x.device.index), x.element_size())
    part_depth = part_depth or depth
    is_even = depth % part_depth == 0 and part_depth % tile.depth == 0
    _linear[product_grid(num_rows, columns, depth, tile, part_depth)](
        x, weight, weight if bias is None else bias, out, num_rows, columns, depth, part_depth,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, EVEN=is_even,
        SWAPPED=tile.swapped, HAS_BIAS=bias is not None, PRECISION=precision_of(x),
        num_warps=tile.warps, num_stages=tile.stages, **pdl_options(x),
    )  # fmt: skip
    return out


@cache
def shared_bytes_of(device: int) -> int:
    """Return the bytes of shared memory that a kernel may have on this GPU."""
    max_bytes: int = triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]
    return max_bytes


def precision_of(x: Tensor) -> str:
    """Return the precision of float32 products: IEEE instead of TF32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
