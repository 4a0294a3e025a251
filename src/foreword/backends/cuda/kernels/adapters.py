"""LoRA: adds B (A x) to a matrix product, with the adapter of each row.

The summation order of a row depends only on the matrix widths and its adapter, so it has the same bits in any batch.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.launching import kernel
from foreword.models.adapters import MAX_RANK

FIELDS = 3
"""Fields of a table entry: address of A, address of B, rank. Rank 0: the adapter does not change the module."""

MOST_PARTS = 4
"""Maximum modules, such as q, k and v, whose columns are concatenated in one product; each module is a part."""


@kernel()
def _shrink(
    x, slots, table, inner, slot_stride, first, K,
    PARTS: tl.constexpr, MOST_RANK: tl.constexpr, RANKS: tl.constexpr, DEPTH: tl.constexpr, ENTRY: tl.constexpr,
):  # fmt: skip
    """Compute inner[row, part] = A x[row], with the A of the row's adapter for the part's module."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots + row)
    if slot > 0:
        entry = table + (slot.to(tl.int64) * slot_stride + first + part) * ENTRY
        rank = tl.load(entry + 2).to(tl.int32)
        down = tl.load(entry).to(tl.pointer_type(x.dtype.element_ty))
        k = tl.arange(0, DEPTH)
        for begin in range(0, rank, RANKS):
            r = begin + tl.arange(0, RANKS)
            total = tl.zeros((RANKS,), dtype=tl.float32)
            for at in range(0, K, DEPTH):
                inside = (at + k) < K
                numbers = tl.load(x + row * K + at + k, mask=inside, other=0.0).to(tl.float32)
                factor = tl.load(
                    down + r[:, None] * K + at + k[None, :],
                    mask=(r < rank)[:, None] & inside[None, :],
                    other=0.0,
                )
                total += tl.sum(factor.to(tl.float32) * numbers[None, :], axis=1)
            tl.store(inner + (row * PARTS + part) * MOST_RANK + r, total, mask=r < rank)


@kernel()
def _expand(
    inner, slots, table, y, slot_stride, first, N, end0, end1, end2,
    PARTS: tl.constexpr, MOST_RANK: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr, ENTRY: tl.constexpr,
):  # fmt: skip
    """Add B inner[row, part] to y[row, columns of the part], with the B of the row's adapter for the part's module."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots + row)
    if slot > 0:
        entry = table + (slot.to(tl.int64) * slot_stride + first + part) * ENTRY
        rank = tl.load(entry + 2).to(tl.int32)
        up = tl.load(entry + 1).to(tl.pointer_type(y.dtype.element_ty))
        start = tl.where(part == 0, 0, tl.where(part == 1, end0, tl.where(part == 2, end1, end2)))
        next_start = tl.where(part == 0, end0, tl.where(part == 1, end1, end2))
        end = tl.where(part == PARTS - 1, N, next_start)
        n = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        is_valid = n < tl.where(rank > 0, end - start, 0)
        total = tl.zeros((COLUMNS,), dtype=tl.float32)
        for begin in range(0, rank, RANKS):
            r = begin + tl.arange(0, RANKS)
            numbers = tl.load(inner + (row * PARTS + part) * MOST_RANK + r, mask=r < rank, other=0.0)
            factor = tl.load(
                up + n[:, None] * rank + r[None, :], mask=is_valid[:, None] & (r < rank)[None, :], other=0.0
            )
            total += tl.sum(factor.to(tl.float32) * numbers[None, :], axis=1)
        y_at = y + row * N + start + n
        old = tl.load(y_at, mask=is_valid, other=0.0).to(tl.float32)
        tl.store(y_at, (old + total).to(y.dtype.element_ty), mask=is_valid)


def add_factors(
    x: Tensor, y: Tensor, slots: Tensor, table: Tensor, module: tuple[int, int], widths: Sequence[int]
) -> Tensor:
    """Add the output of the rows' adapters for x [rows, K] to y [rows, N], in place, and return y.

    `slots`, int32 [rows], has the slot of each row's adapter; 0: none. `table` is int64 [slots, layers, modules,
    FIELDS]. `module` is (layer, first module). The columns of consecutive modules are side by side in y; `widths` has
    the number of columns of each.
    """
    (rows, depth), parts = x.shape, len(widths)
    layers, modules = table.shape[1], table.shape[2]
    first, stride = module[0] * modules + module[1], layers * modules
    inner = torch.empty((rows, parts, MAX_RANK), dtype=torch.float32, device=x.device)
    _shrink[(rows, parts)](
        x, slots, table, inner, stride, first, depth,
        PARTS=parts, MOST_RANK=MAX_RANK, RANKS=16, DEPTH=min(1024, triton.next_power_of_2(depth)), ENTRY=FIELDS,
        num_warps=8,
    )  # fmt: skip
    ends = [sum(widths[: part + 1]) for part in range(MOST_PARTS - 1)]
    columns = 128
    _expand[(rows, parts, triton.cdiv(max(widths), columns))](
        inner, slots, table, y, stride, first, y.shape[1], *ends,
        PARTS=parts, MOST_RANK=MAX_RANK, RANKS=16, COLUMNS=columns, ENTRY=FIELDS,
    )  # fmt: skip
    return y
