"""Matrix products of experts with their routed rows; the weights of an expert are read once per pass.

Sums go over K in order, as in `linear`. The outputs of a row's experts are added to the stream in order of rank. So a
row has the same bits in any batch.
"""

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.cuda.kernels.ahead import (
    ahead,
    let_the_next_kernel_come,
    wait_for_the_kernel_before,
)
from foreword.backends.cuda.kernels.functions import activated
from foreword.backends.cuda.kernels.linear import Tile, precision_of, product, shared_bytes_of
from foreword.backends.cuda.kernels.mxfp4 import BLOCK, CHUNK, PackedExperts, packed_product
from foreword.backends.cuda.kernels.routing import ExpertBlocks
from foreword.backends.torch.weights import ExpertWeights
from foreword.kernels.launching import kernel
from foreword.models.config import CLAMPED_SLOPE, MlpSpec


@kernel(do_not_specialize=("num_blocks",))
def _gate_up(
    x, weight, exponents, bias, order, experts, firsts, counts, active, num_blocks, K, SIZE, limit,
    TAKEN: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, SWAPPED: tl.constexpr, PACKED: tl.constexpr, BIASED: tl.constexpr, CLAMPED: tl.constexpr,
    GELU: tl.constexpr, SLOPE: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Compute activation(gate) * up of one block of rows and columns; gate first, then up."""
    let_the_next_kernel_come(AHEAD)
    wait_for_the_kernel_before(AHEAD)
    # Neighbouring programs of a large expert read the same weights, which are then in the cache.
    block = tl.program_id(0) % num_blocks
    column = tl.program_id(0) // num_blocks * (COLUMNS // 2)
    count = tl.load(counts + block)
    expert, first = tl.load(experts + block).to(tl.int64), tl.load(firsts + block).to(tl.int64)
    order, active = order + first, active + first * SIZE
    if count > TAIL:
        _gate_up_rows(
            x, weight, exponents, bias, order, active, expert, count, column,
            K, SIZE, limit, TAKEN, ROWS, COLUMNS, DEPTH, EVEN, SWAPPED, PACKED, BIASED, CLAMPED, GELU, SLOPE, PRECISION,
        )  # fmt: skip
    if TAIL > 0 and (count > 0) & (count <= TAIL):
        _gate_up_rows(
            x, weight, exponents, bias, order, active, expert, count, column,
            K, SIZE, limit, TAKEN, TAIL, COLUMNS, DEPTH, EVEN, True, PACKED, BIASED, CLAMPED, GELU, SLOPE, PRECISION,
        )  # fmt: skip


@triton.jit
def _gate_up_rows(
    x, weight, exponents, bias, order, active, expert, count, column, K, SIZE, limit,
    TAKEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, SWAPPED: tl.constexpr, PACKED: tl.constexpr, BIASED: tl.constexpr, CLAMPED: tl.constexpr,
    GELU: tl.constexpr, SLOPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """At most ROWS pairs at `order`, into the rows at `active`."""
    m, n = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    row = tl.load(order + m, mask=m < count, other=0) // TAKEN
    of_size = column + n // 2
    line = n % 2 * SIZE + of_size
    x_at = x + row.to(tl.int64) * K
    if PACKED:
        block = expert * tl.cdiv(K, CHUNK) * tl.cdiv(2 * SIZE, BLOCK) + 2 * column // BLOCK
        total = packed_product(
            x_at, weight + block * 256, exponents + block * 8, m < count, 2 * (SIZE - column), K, 2 * SIZE,
            ROWS, COLUMNS, DEPTH, EVEN, PRECISION,
        )  # fmt: skip
    else:
        weight_at = weight + (expert * 2 * SIZE + line) * K
        total = product(
            x_at, weight_at, m < count, of_size < SIZE, K, ROWS, COLUMNS, DEPTH, EVEN, SWAPPED, PRECISION
        )
    if BIASED:
        bias_at = bias + expert * 2 * SIZE + line
        total += tl.load(bias_at, mask=of_size < SIZE, other=0.0).to(tl.float32)[None, :]
    gate, up = tl.split(tl.reshape(total, (ROWS, COLUMNS // 2, 2)))
    kind = active.dtype.element_ty
    if CLAMPED:
        gate, up = tl.minimum(gate, limit), tl.maximum(tl.minimum(up, limit), -limit)
        said = ((up + 1.0) * gate / (1.0 + tl.exp(-SLOPE * gate))).to(kind)
    else:
        said = activated(gate.to(kind).to(tl.float32), GELU).to(kind) * up.to(kind)
    n = column + tl.arange(0, COLUMNS // 2)
    at = active + m.to(tl.int64)[:, None] * SIZE + n[None, :]
    tl.store(at, said, mask=(m < count)[:, None] & (n < SIZE)[None, :])


@kernel(do_not_specialize=("num_blocks", "num_rows"))
def _down(
    active, weight, exponents, bias, order, experts, firsts, counts, shares, parts, num_blocks, num_rows, N, SIZE,
    TAKEN: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, SWAPPED: tl.constexpr, PACKED: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """One block of rows and columns: parts[rank, row] = the expert's weight for the row times its output."""
    let_the_next_kernel_come(AHEAD)
    wait_for_the_kernel_before(AHEAD)
    block = tl.program_id(0) % num_blocks
    column = tl.program_id(0) // num_blocks * COLUMNS
    count = tl.load(counts + block)
    expert, first = tl.load(experts + block).to(tl.int64), tl.load(firsts + block).to(tl.int64)
    order, active = order + first, active + first * SIZE
    if count > TAIL:
        _down_rows(
            active, weight, exponents, bias, order, shares, parts, expert, count,
            column, num_rows, N, SIZE, TAKEN, ROWS, COLUMNS, DEPTH, EVEN, SWAPPED, PACKED, BIASED, PRECISION,
        )  # fmt: skip
    if TAIL > 0 and (count > 0) & (count <= TAIL):
        _down_rows(
            active, weight, exponents, bias, order, shares, parts, expert, count,
            column, num_rows, N, SIZE, TAKEN, TAIL, COLUMNS, DEPTH, EVEN, True, PACKED, BIASED, PRECISION,
        )  # fmt: skip


@triton.jit
def _down_rows(
    active, weight, exponents, bias, order, shares, parts, expert, count, column, num_rows, N, SIZE,
    TAKEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, SWAPPED: tl.constexpr, PACKED: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """At most ROWS pairs at `order`, of the rows at `active`."""
    m, n = tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    x_at = active + m.to(tl.int64) * SIZE
    if PACKED:
        block = expert * tl.cdiv(SIZE, CHUNK) * tl.cdiv(N, BLOCK) + column // BLOCK
        total = packed_product(
            x_at, weight + block * 256, exponents + block * 8, m < count, N - column, SIZE, N,
            ROWS, COLUMNS, DEPTH, EVEN, PRECISION,
        )  # fmt: skip
    else:
        weight_at = weight + (expert * N + n) * SIZE
        total = product(
            x_at, weight_at, m < count, n < N, SIZE, ROWS, COLUMNS, DEPTH, EVEN, SWAPPED, PRECISION
        )
    if BIASED:
        total += tl.load(bias + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    pair = tl.load(order + m, mask=m < count, other=0)
    share = tl.load(shares + pair, mask=m < count, other=0.0)
    place = (pair % TAKEN).to(tl.int64) * num_rows + pair // TAKEN
    at = parts + place[:, None] * N + n[None, :]
    tl.store(at, total * share[:, None], mask=(m < count)[:, None] & (n < N)[None, :])


Experts = Tensor | PackedExperts
"""The matrices of all experts: [experts, N, K], or packed."""


def expert_gate_up(
    x: Tensor, weights: ExpertWeights[Experts], blocks: ExpertBlocks, mlp: MlpSpec, out: Tensor, tile: Tile
) -> Tensor:
    """Return the input of the experts' second product for x [rows, K]: `out` [pairs, size], pairs in order."""
    spec, bias = mlp.experts, weights.gate_up_bias
    assert spec is not None
    tile = _expert_tile(tile, x, weights.gate_up)
    depth, size, num_blocks = x.shape[1], out.shape[1], len(blocks.experts)
    _gate_up[(num_blocks * triton.cdiv(size, tile.columns // 2),)](
        x, *_arrays(weights.gate_up), x if bias is None else bias, blocks.order, blocks.experts, blocks.firsts,
        blocks.counts, out, num_blocks, depth, size, spec.clamp or 0.0,
        TAKEN=spec.per_token, BIASED=bias is not None, CLAMPED=spec.clamp is not None, GELU=mlp.activation != "silu",
        SLOPE=CLAMPED_SLOPE, **_options(tile, blocks, weights.gate_up, x), **ahead(x),
    )  # fmt: skip
    return out


def expert_down(
    active: Tensor,
    weights: ExpertWeights[Experts],
    blocks: ExpertBlocks,
    shares: Tensor,
    parts: Tensor,
    tile: Tile,
) -> Tensor:
    """Return weighted expert outputs, float32 parts [per token, rows, N].

    `active` is [pairs, size] in the blocks' order. Parts of rows that take no expert stay as they are.
    """
    size, bias = active.shape[1], weights.down_bias
    tile, num_blocks = _expert_tile(tile, active, weights.down), len(blocks.experts)
    per_token, rows, columns = parts.shape
    _down[(num_blocks * triton.cdiv(columns, tile.columns),)](
        active, *_arrays(weights.down), active if bias is None else bias, blocks.order, blocks.experts, blocks.firsts,
        blocks.counts, shares, parts, num_blocks, rows, columns, size,
        TAKEN=per_token, BIASED=bias is not None, **_options(tile, blocks, weights.down, active), **ahead(shares),
    )  # fmt: skip
    return parts


def _arrays(matrices: Experts) -> tuple[Tensor, Tensor]:
    """Return the arrays that a kernel reads; plain numbers have no exponents."""
    if isinstance(matrices, PackedExperts):
        return matrices.codes, matrices.exponents
    return matrices, matrices


TAIL_SHARE = 4
"""An expert's last block of a prompt is computed in as much less time if it has as many times fewer rows."""


def _options(tile: Tile, blocks: ExpertBlocks, matrices: Experts, x: Tensor) -> dict[str, Any]:
    return {
        "ROWS": blocks.rows,
        "TAIL": blocks.rows // TAIL_SHARE if blocks.rows > 64 else 0,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "EVEN": x.shape[1] % tile.depth == 0,
        "SWAPPED": tile.swapped,
        "PACKED": isinstance(matrices, PackedExperts),
        "PRECISION": precision_of(x),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _expert_tile(tile: Tile, x: Tensor, matrices: Experts) -> Tile:
    """Return the tile as these weights can be loaded."""
    if isinstance(matrices, PackedExperts):
        return replace(tile, depth=max(tile.depth, CHUNK.value))
    return fitting(tile, x, x.shape[1])


def fitting(tile: Tile, x: Tensor, depth: int) -> Tile:
    """Return the tile with loads that end with K if possible, within the available shared memory."""
    while tile.depth > 32 and depth % tile.depth:
        tile = replace(tile, depth=tile.depth // 2)
    return tile.within(shared_bytes_of(x.device.index), x.element_size()) if x.is_cuda else tile
