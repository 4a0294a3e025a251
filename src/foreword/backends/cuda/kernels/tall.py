"""Matrix products for 64 to 256 rows on GPUs with a tensor memory accelerator (Hopper and later).

One program computes all rows of a pass, which minimises L2 traffic of weights and input. Since tile sides are powers of
two, the program holds the rows in two pieces, such as 128 + 64. It sums in the order of `linear`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from foreword.backends.cuda.kernels.linear import shared_bytes_of
from foreword.kernels.launching import kernel


@dataclass(frozen=True)
class TallTile:
    """Tile sizes of a product. They do not change a bit of the result."""

    rows: int  # of the input
    more_rows: int  # of the input, in a second piece; 0: none
    columns: int  # of the output
    depth: int  # of K, loaded at a time
    warps: int = 4
    stages: int = 4

    @property
    def shared_bytes(self) -> int:
        """Return the bytes of shared memory of all stages, of 16-bit numbers, and of their barriers."""
        return self.stages * (self.rows + self.more_rows + self.columns) * self.depth * 2 + 1024


@kernel(do_not_specialize=("num_rows",))
def _tall_linear(
    x, more_x, weight, y, num_rows, N, part_depth,
    ROWS: tl.constexpr, MORE: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """y[part, m, n] = sum over the part's k of x[m, k] weight[n, k]; x and weight are tensor descriptors."""
    tiles_of_rows = tl.cdiv(num_rows, ROWS + MORE)
    row = tl.program_id(0) % tiles_of_rows * (ROWS + MORE)
    column = tl.program_id(0) // tiles_of_rows * COLUMNS
    part = tl.program_id(1)
    total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    if MORE > 0:
        more_total = tl.zeros((COLUMNS, MORE), dtype=tl.float32)
    for k in range(part * part_depth, (part + 1) * part_depth, DEPTH):
        w = weight.load([column, k])
        total = tl.dot(w, tl.trans(x.load([row, k])), total)
        if MORE > 0:
            more_total = tl.dot(w, tl.trans(more_x.load([row + ROWS, k])), more_total)
    y += part.to(tl.int64) * num_rows * N
    _store(total, y, row, column, num_rows, N, ROWS, COLUMNS)
    if MORE > 0:
        _store(more_total, y, row + ROWS, column, num_rows, N, MORE, COLUMNS)


@triton.jit
def _store(total, y, row, column, num_rows, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    m, n = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    y_at = y + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(y_at, tl.trans(total).to(y.dtype.element_ty), mask=(m < num_rows)[:, None] & (n < N)[None, :])


def tall_linear(
    x: Tensor, weight: Tensor, out: Tensor, tile: TallTile, part_depth: int | None = None
) -> Tensor:
    """Write x [rows, K] times weight [N, K] to out [rows, N]; in parts as `linear`. `can_be_tall` must hold."""
    (num_rows, depth), columns = x.shape, len(weight)
    part_depth = part_depth or depth
    grid = (
        triton.cdiv(num_rows, tile.rows + tile.more_rows) * triton.cdiv(columns, tile.columns),
        depth // part_depth,
    )
    _tall_linear[grid](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(x, [tile.more_rows or tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
        out, num_rows, columns, part_depth,
        ROWS=tile.rows, MORE=tile.more_rows, COLUMNS=tile.columns, DEPTH=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def can_be_tall(x: Tensor, weight: Tensor, tile: TallTile, part_depth: int) -> bool:
    """Return whether `tall_linear` can compute this product: TMA can load it, and a part is a whole number of loads."""
    depth = x.shape[1]
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
        and tile.shared_bytes <= shared_bytes_of(x.device.index)
        and depth % part_depth == 0
        and part_depth % tile.depth == 0
        and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
    )
