"""Matrix products of experts with their routed rows; the weights of an expert are read once per pass.

Sums go over K in order, as in `linear`. The outputs of a row's experts are added to the stream in order of rank. So a
row has the same bits in any batch.
"""

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.cuda.kernels.dependent_launch import begin_kernel, pdl_options
from foreword.backends.cuda.kernels.functions import activated
from foreword.backends.cuda.kernels.linear import Tile, precision_of, product, shared_bytes_of
from foreword.backends.cuda.kernels.mxfp4 import BLOCK, CHUNK, PackedExperts, packed_product
from foreword.backends.cuda.kernels.routing import ExpertBlocks
from foreword.backends.torch.weights import ExpertWeights
from foreword.kernels.launching import kernel
from foreword.models.config import CLAMPED_SLOPE, MlpSpec


@triton.jit
def _tile_of_program(num_blocks, num_columns, TAIL: tl.constexpr):
    """Return the index of the block of rows, and of the tile of columns, that this program computes.

    In decoding, neighbouring programs have the same columns, so that blocks of one expert share the weights in the
    cache. In prompts (TAIL), they have the same block, and share its rows.
    """
    index = tl.program_id(0)
    if TAIL > 0:
        return index // num_columns, index % num_columns
    return index % num_blocks, index // num_blocks


@kernel(do_not_specialize=("num_blocks",))
def _gate_up(
    x, weight, exponents, bias, order, experts, firsts, counts, active, num_blocks, K, SIZE, limit,
    PER_TOKEN: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, SWAPPED: tl.constexpr, PACKED: tl.constexpr, BIASED: tl.constexpr, CLAMPED: tl.constexpr,
    MATRICES: tl.constexpr, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute activation(gate) * up of one block of rows and columns; an expert's gate rows precede its up rows.

    MATRICES 1: experts have no gate, and activation(up) is computed.
    Up to TAIL rows are computed as a block of TAIL rows; TAIL 0: all blocks have ROWS rows.
    """
    begin_kernel(PDL)
    block, column = _tile_of_program(num_blocks, tl.cdiv(SIZE, COLUMNS // MATRICES), TAIL)
    column *= COLUMNS // MATRICES
    count = tl.load(counts + block)
    expert, first = tl.load(experts + block).to(tl.int64), tl.load(firsts + block).to(tl.int64)
    order, active = order + first, active + first * SIZE
    if count > TAIL:
        _gate_up_rows(
            x, weight, exponents, bias, order, active, expert, count, column,
            K, SIZE, limit, PER_TOKEN, ROWS, COLUMNS, DEPTH, EVEN, SWAPPED, PACKED, BIASED, CLAMPED, MATRICES,
            ACTIVATION, SLOPE, PRECISION,
        )  # fmt: skip
    if TAIL > 0 and (count > 0) & (count <= TAIL):
        _gate_up_rows(
            x, weight, exponents, bias, order, active, expert, count, column,
            K, SIZE, limit, PER_TOKEN, TAIL, COLUMNS, DEPTH, EVEN, True, PACKED, BIASED, CLAMPED, MATRICES,
            ACTIVATION, SLOPE, PRECISION,
        )  # fmt: skip


@triton.jit
def _gate_up_rows(
    x, weight, exponents, bias, order, active, expert, count, column, K, SIZE, limit,
    PER_TOKEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, SWAPPED: tl.constexpr, PACKED: tl.constexpr, BIASED: tl.constexpr, CLAMPED: tl.constexpr,
    MATRICES: tl.constexpr, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute at most ROWS (row, expert) pairs, which `order` points to, and write them to the rows at `active`."""
    m, n = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    row = tl.load(order + m, mask=m < count, other=0) // PER_TOKEN
    of_size = column + n // MATRICES
    line = n % MATRICES * SIZE + of_size
    x_at = x + row.to(tl.int64) * K
    if PACKED:
        block = expert * tl.cdiv(K, CHUNK) * tl.cdiv(MATRICES * SIZE, BLOCK) + MATRICES * column // BLOCK
        total = packed_product(
            x_at, weight + block * 256, exponents + block * 8, m < count, MATRICES * (SIZE - column), K,
            MATRICES * SIZE, ROWS, COLUMNS, DEPTH, EVEN, PRECISION,
        )  # fmt: skip
    else:
        weight_at = weight + (expert * MATRICES * SIZE + line) * K
        total = product(
            x_at, weight_at, m < count, of_size < SIZE, K, ROWS, COLUMNS, DEPTH, EVEN, SWAPPED, PRECISION
        )
    if BIASED:
        bias_at = bias + expert * MATRICES * SIZE + line
        total += tl.load(bias_at, mask=of_size < SIZE, other=0.0).to(tl.float32)[None, :]
    dtype = active.dtype.element_ty
    if MATRICES == 1:
        result = activated(total.to(dtype).to(tl.float32), ACTIVATION).to(dtype)
    else:
        gate, up = tl.split(tl.reshape(total, (ROWS, COLUMNS // 2, 2)))
        if CLAMPED:
            gate, up = tl.minimum(gate, limit), tl.maximum(tl.minimum(up, limit), -limit)
            result = ((up + 1.0) * gate / (1.0 + tl.exp(-SLOPE * gate))).to(dtype)
        else:
            result = activated(gate.to(dtype).to(tl.float32), ACTIVATION).to(dtype) * up.to(dtype)
    n = column + tl.arange(0, COLUMNS // MATRICES)
    at = active + m.to(tl.int64)[:, None] * SIZE + n[None, :]
    tl.store(at, result, mask=(m < count)[:, None] & (n < SIZE)[None, :])


@kernel(do_not_specialize=("num_blocks", "num_rows"))
def _down(
    active, weight, exponents, bias, order, experts, firsts, counts, shares, parts, num_blocks, num_rows, N, SIZE,
    PER_TOKEN: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, SWAPPED: tl.constexpr, PACKED: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute one block of rows and columns: parts[rank, row] = the expert's share of the row times its output."""
    begin_kernel(PDL)
    block, column = _tile_of_program(num_blocks, tl.cdiv(N, COLUMNS), TAIL)
    column *= COLUMNS
    count = tl.load(counts + block)
    expert, first = tl.load(experts + block).to(tl.int64), tl.load(firsts + block).to(tl.int64)
    order, active = order + first, active + first * SIZE
    if count > TAIL:
        _down_rows(
            active, weight, exponents, bias, order, shares, parts, expert, count,
            column, num_rows, N, SIZE, PER_TOKEN, ROWS, COLUMNS, DEPTH, EVEN, SWAPPED, PACKED, BIASED, PRECISION,
        )  # fmt: skip
    if TAIL > 0 and (count > 0) & (count <= TAIL):
        _down_rows(
            active, weight, exponents, bias, order, shares, parts, expert, count,
            column, num_rows, N, SIZE, PER_TOKEN, TAIL, COLUMNS, DEPTH, EVEN, True, PACKED, BIASED, PRECISION,
        )  # fmt: skip


@triton.jit
def _down_rows(
    active, weight, exponents, bias, order, shares, parts, expert, count, column, num_rows, N, SIZE,
    PER_TOKEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, SWAPPED: tl.constexpr, PACKED: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute at most ROWS (row, expert) pairs, which `order` points to, from the rows at `active`."""
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
    index = (pair % PER_TOKEN).to(tl.int64) * num_rows + pair // PER_TOKEN
    at = parts + index[:, None] * N + n[None, :]
    tl.store(at, total * share[:, None], mask=(m < count)[:, None] & (n < N)[None, :])


Experts = Tensor | PackedExperts
"""The matrices of all experts: [experts, N, K], or packed."""


def expert_gate_up(
    x: Tensor, weights: ExpertWeights[Experts], blocks: ExpertBlocks, mlp: MlpSpec, out: Tensor, tile: Tile
) -> Tensor:
    """Write activation(gate) * up of x [rows, K] to `out` [pairs, size], with pairs in the blocks' order; return it.

    Experts without a gate give activation(up).
    """
    spec, bias, matrices = mlp.experts, weights.gate_up_bias, 2 if mlp.gated else 1
    assert spec is not None
    tile = _expert_tile(tile, x, weights.gate_up)
    depth, size, num_blocks = x.shape[1], out.shape[1], len(blocks.experts)
    _gate_up[(num_blocks * triton.cdiv(size, tile.columns // matrices),)](
        x, *_arrays(weights.gate_up), x if bias is None else bias, blocks.order, blocks.experts, blocks.firsts,
        blocks.counts, out, num_blocks, depth, size, spec.clamp or 0.0,
        PER_TOKEN=spec.per_token, BIASED=bias is not None, CLAMPED=spec.clamp is not None,
        MATRICES=matrices, ACTIVATION=mlp.activation, SLOPE=CLAMPED_SLOPE,
        **_options(tile, blocks, weights.gate_up, x), **pdl_options(x),
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
    """Write the experts' outputs times their shares to `parts`, float32 [per token, rows, N], and return it.

    `active` is [pairs, size] in the blocks' order, `shares` are the routing weights. Parts of rows without experts
    (padding) are not written.
    """
    size, bias = active.shape[1], weights.down_bias
    tile, num_blocks = _expert_tile(tile, active, weights.down), len(blocks.experts)
    per_token, rows, columns = parts.shape
    _down[(num_blocks * triton.cdiv(columns, tile.columns),)](
        active, *_arrays(weights.down), active if bias is None else bias, blocks.order, blocks.experts, blocks.firsts,
        blocks.counts, shares, parts, num_blocks, rows, columns, size,
        PER_TOKEN=per_token, BIASED=bias is not None, **_options(tile, blocks, weights.down, active),
        **pdl_options(shares),
    )  # fmt: skip
    return parts


def _arrays(matrices: Experts) -> tuple[Tensor, Tensor]:
    """Return the matrices' numbers and exponents; unpacked matrices stand in for exponents, which are not read."""
    if isinstance(matrices, PackedExperts):
        return matrices.codes, matrices.exponents
    return matrices, matrices


TAIL_SHARE = 4
"""Rows of a block divided by TAIL: the last block of an expert is smaller if it has few enough rows."""


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
    """Return the tile with a depth that suits these weights."""
    if isinstance(matrices, PackedExperts):
        return replace(tile, depth=max(tile.depth, CHUNK.value))
    return fitting(tile, x, x.shape[1])


def fitting(tile: Tile, x: Tensor, depth: int) -> Tile:
    """Return the tile within the available shared memory, with a depth that divides K if possible."""
    while tile.depth > 32 and depth % tile.depth:
        tile = replace(tile, depth=tile.depth // 2)
    return tile.within(shared_bytes_of(x.device.index), x.element_size()) if x.is_cuda else tile
