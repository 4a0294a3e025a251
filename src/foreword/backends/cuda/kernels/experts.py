"""Matrix products of experts with their routed rows; the weights of an expert are read once per pass.

Sums go over K in order, as in `linear`. The outputs of a row's experts are parts in order of rank, and are added to the
stream in this order, so a row has the same bits in any batch.
"""

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.cuda.kernels.ahead import (
    ahead,
    let_the_next_kernel_come,
    wait_for_the_kernel_before,
)
from foreword.backends.cuda.kernels.functions import activated
from foreword.backends.cuda.kernels.linear import Tile, precision_of, shared_bytes_of
from foreword.backends.cuda.kernels.routing import ExpertBlocks
from foreword.backends.torch.weights import ExpertWeights
from foreword.kernels.launching import kernel
from foreword.models.config import CLAMPED_SLOPE, MlpSpec


@triton.jit
def product(
    x_at, weight_at, row_there, column_there, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, SWAPPED: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[ROWS, COLUMNS], product of the rows at x_at [ROWS] with the weights at weight_at [COLUMNS]."""
    k = tl.arange(0, DEPTH)
    x_at, weight_at = x_at[:, None] + k[None, :], weight_at[:, None] + k[None, :]
    if SWAPPED:
        total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    else:
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, K, DEPTH):
        if EVEN:
            a = tl.load(x_at, mask=row_there[:, None], other=0.0)
            b = tl.load(weight_at, mask=column_there[:, None], other=0.0)
        else:
            inside = (first + k) < K
            a = tl.load(x_at, mask=row_there[:, None] & inside[None, :], other=0.0)
            b = tl.load(weight_at, mask=column_there[:, None] & inside[None, :], other=0.0)
        if SWAPPED:
            total = tl.dot(b, tl.trans(a), total, input_precision=PRECISION)
        else:
            total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
        x_at += DEPTH
        weight_at += DEPTH
    if SWAPPED:
        total = tl.trans(total)
    return total


@kernel(do_not_specialize=("num_blocks",))
def _gate_up(
    x, weight, bias, order, experts, firsts, counts, active, num_blocks, K, SIZE, limit,
    TAKEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, SWAPPED: tl.constexpr, BIASED: tl.constexpr, CLAMPED: tl.constexpr, GELU: tl.constexpr,
    SLOPE: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Compute activation(gate) * up of one block of rows and columns; gate first, then up."""
    let_the_next_kernel_come(AHEAD)
    wait_for_the_kernel_before(AHEAD)
    # Neighbouring programs of a large expert read the same weights, which are then in the cache.
    block, half = tl.program_id(0) % num_blocks, COLUMNS // 2
    column = tl.program_id(0) // num_blocks * half
    count = tl.load(counts + block)
    if count == 0:
        return
    expert, first = tl.load(experts + block).to(tl.int64), tl.load(firsts + block)
    m, n = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    row = tl.load(order + first + m, mask=m < count, other=0) // TAKEN
    of_size = column + n // 2
    x_at = x + row.to(tl.int64) * K
    weight_at = weight + ((2 * expert + n % 2) * SIZE + of_size) * K
    total = product(
        x_at, weight_at, m < count, of_size < SIZE, K, ROWS, COLUMNS, DEPTH, EVEN, SWAPPED, PRECISION
    )
    if BIASED:
        bias_at = bias + (2 * expert + n % 2) * SIZE + of_size
        total += tl.load(bias_at, mask=of_size < SIZE, other=0.0).to(tl.float32)[None, :]
    gate, up = tl.split(tl.reshape(total, (ROWS, COLUMNS // 2, 2)))
    kind = active.dtype.element_ty
    if CLAMPED:
        gate, up = tl.minimum(gate, limit), tl.maximum(tl.minimum(up, limit), -limit)
        said = ((up + 1.0) * gate / (1.0 + tl.exp(-SLOPE * gate))).to(kind)
    else:
        said = activated(gate.to(kind).to(tl.float32), GELU).to(kind) * up.to(kind)
    n = column + tl.arange(0, COLUMNS // 2)
    at = active + (first + m).to(tl.int64)[:, None] * SIZE + n[None, :]
    tl.store(at, said, mask=(m < count)[:, None] & (n < SIZE)[None, :])


@kernel(do_not_specialize=("num_blocks", "num_rows"))
def _down(
    active, weight, bias, order, experts, firsts, counts, shares, parts, num_blocks, num_rows, N, SIZE,
    TAKEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, SWAPPED: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One block of rows and columns: parts[rank, row] = the expert's weight for the row times its output."""
    let_the_next_kernel_come(AHEAD)
    wait_for_the_kernel_before(AHEAD)
    block = tl.program_id(0) % num_blocks
    n = tl.program_id(0) // num_blocks * COLUMNS + tl.arange(0, COLUMNS)
    count = tl.load(counts + block)
    if count == 0:
        return
    expert, first = tl.load(experts + block).to(tl.int64), tl.load(firsts + block)
    m = tl.arange(0, ROWS)
    x_at = active + (first + m).to(tl.int64) * SIZE
    weight_at = weight + (expert * N + n) * SIZE
    total = product(x_at, weight_at, m < count, n < N, SIZE, ROWS, COLUMNS, DEPTH, EVEN, SWAPPED, PRECISION)
    if BIASED:
        total += tl.load(bias + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    pair = tl.load(order + first + m, mask=m < count, other=0)
    share = tl.load(shares + pair, mask=m < count, other=0.0)
    place = (pair % TAKEN).to(tl.int64) * num_rows + pair // TAKEN
    at = parts + place[:, None] * N + n[None, :]
    tl.store(at, total * share[:, None], mask=(m < count)[:, None] & (n < N)[None, :])


def expert_gate_up(
    x: Tensor, weights: ExpertWeights, blocks: ExpertBlocks, mlp: MlpSpec, out: Tensor, tile: Tile
) -> Tensor:
    """What is between the two products of experts that `mlp` describes, for x [rows, K]: out [pairs, size] in order."""
    spec, bias = mlp.experts, weights.gate_up_bias
    assert spec is not None
    tile = fitting(tile, x, x.shape[1])
    depth, size, num_blocks = x.shape[1], out.shape[1], len(blocks.experts)
    _gate_up[(num_blocks * triton.cdiv(size, tile.columns // 2),)](
        x, weights.gate_up, x if bias is None else bias, blocks.order, blocks.experts, blocks.firsts, blocks.counts,
        out, num_blocks, depth, size, spec.clamp or 0.0,
        TAKEN=spec.per_token, ROWS=blocks.rows, COLUMNS=tile.columns, DEPTH=tile.depth, EVEN=depth % tile.depth == 0,
        SWAPPED=tile.swapped, BIASED=bias is not None, CLAMPED=spec.clamp is not None, GELU=mlp.activation != "silu",
        SLOPE=CLAMPED_SLOPE, PRECISION=precision_of(x),
        num_warps=tile.warps, num_stages=tile.stages, **ahead(x),
    )  # fmt: skip
    return out


def expert_down(
    active: Tensor, weights: ExpertWeights, blocks: ExpertBlocks, shares: Tensor, parts: Tensor, tile: Tile
) -> Tensor:
    """Return weighted expert outputs, float32 parts [per token, rows, N].

    `active` is [pairs, size] in the blocks' order. Parts of rows that take no expert stay as they are.
    """
    size, bias = active.shape[1], weights.down_bias
    tile, num_blocks = fitting(tile, active, size), len(blocks.experts)
    per_token, rows, columns = parts.shape
    _down[(num_blocks * triton.cdiv(columns, tile.columns),)](
        active, weights.down, active if bias is None else bias, blocks.order, blocks.experts, blocks.firsts,
        blocks.counts, shares, parts, num_blocks, rows, columns, size,
        TAKEN=per_token, ROWS=blocks.rows, COLUMNS=tile.columns, DEPTH=tile.depth, EVEN=size % tile.depth == 0,
        SWAPPED=tile.swapped, BIASED=bias is not None, PRECISION=precision_of(active),
        num_warps=tile.warps, num_stages=tile.stages, **ahead(shares),
    )  # fmt: skip
    return parts


def fitting(tile: Tile, x: Tensor, depth: int) -> Tile:
    """Return the tile with loads that end with K if possible, within the available shared memory."""
    while tile.depth > 32 and depth % tile.depth:
        tile = replace(tile, depth=tile.depth // 2)
    return tile.within(shared_bytes_of(x.device.index), x.element_size()) if x.is_cuda else tile
