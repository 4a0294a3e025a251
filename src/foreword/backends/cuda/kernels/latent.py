"""Latent attention except its softmax: the write of the stored row, and per-head products."""

import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.cuda.kernels.dependent_launch import begin_kernel, pdl_options
from foreword.backends.cuda.kernels.experts import fitting
from foreword.backends.cuda.kernels.linear import Tile, precision_of, product
from foreword.kernels.launching import kernel

HEADS_AT_ONCE = 16
"""Heads of a row that one program rotates."""


@triton.jit
def _rotated(source, cosines, sines, row, mask, i, HALF: tl.constexpr):
    """Return both halves of the numbers at `source`, rotated."""
    dtype = source.dtype.element_ty
    a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cosines + row * HALF + i, mask=i < HALF, other=0.0)[None, :]
    sin = tl.load(sines + row * HALF + i, mask=i < HALF, other=0.0)[None, :]
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)


@triton.jit
def _store_row(
    source, norm, cosines, sines, row, stored, i, eps, ROPE: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr
):  # fmt: skip
    """Write a latent row to `stored`: its first RANK numbers normalised, the others rotated."""
    rank = tl.arange(0, RANK_BLOCK)
    numbers = tl.load(source + rank, mask=rank < RANK, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(numbers * numbers, axis=0) / RANK + eps)
    gain = tl.load(norm + rank, mask=rank < RANK, other=0.0)
    tl.store(stored + rank, gain * (numbers * scale).to(gain.dtype), mask=rank < RANK)
    mask = (i < ROPE // 2)[None, :]
    first_half, second_half = _rotated(source + RANK + i[None, :], cosines, sines, row, mask, i, ROPE // 2)
    tl.store(stored + RANK + i[None, :], first_half, mask=mask)
    tl.store(stored + RANK + ROPE // 2 + i[None, :], second_half, mask=mask)


@kernel()
def _store_latent(
    query, row_at, norm, cosines, sines, slots, queries, keys, query_stride, row_stride, eps,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, RANK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, RANK_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate some heads of one row; the first program also writes the stored row."""
    begin_kernel(PDL)
    row, half = tl.program_id(0).to(tl.int64), ROPE // 2
    i = tl.arange(0, HALF_BLOCK)
    if tl.program_id(1) == 0:
        stored = keys + tl.load(slots + row).to(tl.int64) * (RANK + ROPE)
        _store_row(
            row_at + row * row_stride, norm, cosines, sines, row, stored, i, eps, ROPE, RANK, RANK_BLOCK
        )
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    mask = (head < HEADS)[:, None] & (i < half)[None, :]
    source = query + row * query_stride + (head * (NOPE + ROPE))[:, None] + NOPE + i[None, :]
    first_half, second_half = _rotated(source, cosines, sines, row, mask, i, ROPE // 2)
    at = queries + (row * HEADS + head)[:, None] * (RANK + ROPE) + RANK + i[None, :]
    tl.store(at, first_half, mask=mask)
    tl.store(at + half, second_half, mask=mask)


def store_latent(
    query: Tensor,
    latent: Tensor,
    norm: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    slots: Tensor,
    eps: float,
    keys: Tensor,
    out: Tensor,
) -> None:
    """Write the latent rows [rows, rank + rope], normalised and rotated, to their slots of `keys`.

    `keys` is [physical rows, 1, rank + rope]. The rotated part of query [rows, heads * (nope + rope)] is written to the
    end of out [rows, heads, rank + rope]. Cosines and sines are float32 [rows, rope / 2].
    """
    rows, heads, width = out.shape
    rope = 2 * cos_sin[0].shape[1]
    rank = width - rope
    _store_latent[(rows, triton.cdiv(heads, HEADS_AT_ONCE))](
        query, latent, norm, *cos_sin, slots, out, keys, query.stride(0), latent.stride(0), eps,
        HEADS=heads, NOPE=query.shape[1] // heads - rope, ROPE=rope, RANK=rank, HEAD_BLOCK=HEADS_AT_ONCE,
        HALF_BLOCK=triton.next_power_of_2(rope // 2), RANK_BLOCK=triton.next_power_of_2(rank), **pdl_options(out),
    )  # fmt: skip


@kernel(do_not_specialize=("num_rows",))
def _per_head(
    x, weight, out, num_rows, N, K, row_stride, head_stride, out_row_stride, out_head_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, SWAPPED: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_kernel(PDL)
    head, row_tiles = tl.program_id(1).to(tl.int64), tl.cdiv(num_rows, ROWS)
    m = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
    x_at = x + head * head_stride + m.to(tl.int64) * row_stride
    weight_at = weight + (head * N + n) * K
    total = product(x_at, weight_at, m < num_rows, n < N, K, ROWS, COLUMNS, DEPTH, EVEN, SWAPPED, PRECISION)
    at = out + head * out_head_stride + m.to(tl.int64)[:, None] * out_row_stride + n[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(m < num_rows)[:, None] & (n < N)[None, :])


def per_head(x: Tensor, weight: Tensor, out: Tensor, tile: Tile) -> Tensor:
    """Write the sum over k of x[row, head, k] weight[head, n, k] to out[row, head, n] and return `out`.

    The weights are contiguous.
    """
    (rows, heads, depth), columns = x.shape, weight.shape[1]
    tile = fitting(tile, x, depth)
    _per_head[(triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns), heads)](
        x, weight, out, rows, columns, depth, x.stride(0), x.stride(1), out.stride(0), out.stride(1),
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, EVEN=depth % tile.depth == 0,
        SWAPPED=tile.swapped, PRECISION=precision_of(x), num_warps=tile.warps, num_stages=tile.stages, **pdl_options(x),
    )  # fmt: skip
    return out
