"""Small kernels over whole rows: embedding, norms, rotation with the write to KV memory, activation."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.cuda.kernels.ahead import (
    ahead,
    let_the_next_kernel_come,
    wait_for_the_kernel_before,
)
from foreword.backends.cuda.kernels.fp8 import Fp8Rows, group_of, memory_of, padded, row_warps, store_rounded
from foreword.kernels.launching import is_recording, kernel

HEADS_AT_ONCE = 16
"""Heads of a row that one program rotates."""


@kernel()
def _embed(token_ids, table, stream, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ids + row).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    there = columns < WIDTH
    numbers = tl.load(table + token * WIDTH + columns, mask=there)
    tl.store(stream + row * WIDTH + columns, numbers, mask=there)


def embed(token_ids: Tensor, table: Tensor, out: Tensor) -> Tensor:
    """Rows of the embedding [vocab, hidden] for token_ids [rows]."""
    width = table.shape[1]
    _embed[(len(token_ids),)](token_ids, table, out, WIDTH=width, BLOCK=triton.next_power_of_2(width))
    return out


@kernel(do_not_specialize=("rows",))
def _fill_in(token_ids, drawn, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + row, mask=row < rows, other=0)
    is_pending = (row < rows) & (token < 0)
    found = tl.load(drawn + (-1 - token), mask=is_pending, other=0)
    tl.store(token_ids + row, tl.maximum(found, 0).to(tl.int32), mask=is_pending)


def fill_in(token_ids: Tensor, drawn: Tensor) -> None:
    """Put what the pass before has drawn in the place of the ids that stand for it: `backends.batch.known_ids`."""
    _fill_in[(triton.cdiv(len(token_ids), 256),)](token_ids, drawn, len(token_ids), BLOCK=256)
    if is_recording():
        token_ids.clamp_(min=0)  # what reads them is no kernel of ours, and must find tokens


@triton.jit
def _sum_of_parts(
    parts, num_rows, row, columns, there, WIDTH: tl.constexpr, PARTS: tl.constexpr, kind: tl.constexpr
):
    """Of one row: float32 parts [PARTS, rows, width] added in their order, then rounded as a product is."""
    total = tl.load(parts + row * WIDTH + columns, mask=there, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + (part * num_rows + row) * WIDTH + columns, mask=there, other=0.0)
    return total.to(kind)


@kernel(do_not_specialize=("num_rows",))
def _add_norm(
    stream, delta, weight, out, values, scales, num_rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    let_the_next_kernel_come(AHEAD)
    wait_for_the_kernel_before(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    there = columns < WIDTH
    x = tl.load(stream + row * WIDTH + columns, mask=there, other=0.0)
    if ADDS:
        if PARTS > 0:
            more = _sum_of_parts(delta, num_rows, row, columns, there, WIDTH, PARTS, x.dtype)
        else:
            more = tl.load(delta + row * WIDTH + columns, mask=there, other=0.0)
        x = x.to(tl.float32) + more.to(tl.float32)
        x = x.to(stream.dtype.element_ty)
        tl.store(stream + row * WIDTH + columns, x, mask=there)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    scaled = (wide * scale).to(out.dtype.element_ty)
    gain = tl.load(weight + columns, mask=there, other=0.0)
    normed = gain * scaled
    tl.store(out + row * WIDTH + columns, normed, mask=there)
    if GROUP > 0:
        store_rounded(normed, values, scales, row, columns, there, WIDTH, BLOCK, GROUP)


def add_norm(
    stream: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    rounded: Fp8Rows | None = None,
) -> Tensor:
    """Add `delta` to `stream` [rows, hidden] in place, then the RMS norm of the sum, times `weight`.

    `delta` is [rows, hidden] or a product in parts, float32 [parts, rows, hidden]. `rounded` gets the result in 8 bits.
    """
    rows, width = stream.shape
    block = padded(width, rounded)
    parts = len(delta) if delta is not None and delta.ndim == 3 else 0
    _add_norm[(rows,)](
        stream, stream if delta is None else delta, weight, out, *memory_of(rounded, out), rows, eps,
        WIDTH=width, BLOCK=block, ADDS=delta is not None, PARTS=parts, GROUP=group_of(rounded, block),
        num_warps=4 if block <= 2048 else 8, **ahead(stream),
    )  # fmt: skip
    return out


@kernel(do_not_specialize=("num_rows",))
def _join_parts(
    parts, bias, out, num_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < WIDTH
    kind: tl.constexpr = tl.float32 if HAS_BIAS else out.dtype.element_ty
    total = _sum_of_parts(parts, num_rows, row, columns, there, WIDTH, PARTS, kind)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, total.to(out.dtype.element_ty), mask=there)


def join_parts(parts: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """A product in parts, float32 [parts, rows, width], as one: their sum, + bias, into out [rows, width]."""
    rows, width = out.shape
    block = min(1024, triton.next_power_of_2(width))
    _join_parts[(rows, triton.cdiv(width, block))](
        parts, parts if bias is None else bias, out, rows,
        WIDTH=width, BLOCK=block, PARTS=len(parts), HAS_BIAS=bias is not None,
    )  # fmt: skip
    return out


@kernel()
def _rotate_and_keep(
    qkv, cosines, sines, slots, query_norm, key_norm, queries, keys, values, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, NORMED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Some heads of one row: queries are rotated into `queries`, keys and values go to the row's KV slot."""
    let_the_next_kernel_come(AHEAD)
    wait_for_the_kernel_before(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = DIM // 2
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    i = tl.arange(0, HALF_BLOCK)
    there = (head < HEADS + 2 * KV_HEADS)[:, None] & (i < half)[None, :]
    is_query = there & (head < HEADS)[:, None]
    is_key = there & ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None]
    is_value = there & (head >= HEADS + KV_HEADS)[:, None]
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head)[:, None] * DIM + i[None, :]
    first = tl.load(source, mask=there, other=0.0)
    second = tl.load(source + half, mask=there, other=0.0)
    slot = tl.load(slots + row).to(tl.int64)
    value_at = values + (slot * KV_HEADS + head - HEADS - KV_HEADS)[:, None] * DIM + i[None, :]
    tl.store(value_at, first, mask=is_value)
    tl.store(value_at + half, second, mask=is_value)
    a, b = first.to(tl.float32), second.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / DIM + eps)[:, None]
        kind = qkv.dtype.element_ty
        gain = tl.where((head < HEADS)[:, None], query_norm, key_norm) + i[None, :]
        a = (tl.load(gain, mask=there, other=0.0) * (a * scale).to(kind)).to(tl.float32)
        b = (tl.load(gain + half, mask=there, other=0.0) * (b * scale).to(kind)).to(tl.float32)
    cos = tl.load(cosines + row * half + i, mask=i < half, other=0.0)[None, :]
    sin = tl.load(sines + row * half + i, mask=i < half, other=0.0)[None, :]
    left, right = (
        (a * cos - b * sin).to(queries.dtype.element_ty),
        (b * cos + a * sin).to(queries.dtype.element_ty),
    )
    query_at = queries + (row * HEADS + head)[:, None] * DIM + i[None, :]
    tl.store(query_at, left, mask=is_query)
    tl.store(query_at + half, right, mask=is_query)
    key_at = keys + (slot * KV_HEADS + head - HEADS)[:, None] * DIM + i[None, :]
    tl.store(key_at, left, mask=is_key)
    tl.store(key_at + half, right, mask=is_key)


def rotate_and_keep(
    qkv: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    slots: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
) -> Tensor:
    """Split qkv [rows, heads + 2 kv heads, dim]: rotated queries to `out`, rotated keys and values to their slots.

    `norms` are of queries and keys, before the rotation; cosines and sines are float32 [rows, dim / 2]; keys and values
    are [physical rows, kv heads, dim].
    """
    rows, heads, dim = out.shape
    kv_heads = keys.shape[1]
    query_norm, key_norm = norms or (qkv, qkv)
    _rotate_and_keep[(rows, triton.cdiv(heads + 2 * kv_heads, HEADS_AT_ONCE))](
        qkv, *cos_sin, slots, query_norm, key_norm, out, keys, values, eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, HEAD_BLOCK=HEADS_AT_ONCE,
        HALF_BLOCK=triton.next_power_of_2(dim // 2), NORMED=norms is not None, num_warps=8, **ahead(out),
    )  # fmt: skip
    return out


@kernel()
def _silu_times_up(
    gate_up, out, values, scales,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    let_the_next_kernel_come(AHEAD)
    wait_for_the_kernel_before(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + columns, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + columns, mask=there, other=0.0)
    active = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)
    tl.store(out + row * WIDTH + columns, active * up, mask=there)
    if GROUP > 0:
        store_rounded(active * up, values, scales, row, columns, there, WIDTH, BLOCK, GROUP)


def silu_times_up(gate_up: Tensor, out: Tensor, rounded: Fp8Rows | None = None) -> Tensor:
    """silu(gate) * up of gate_up [rows, 2 width], into out [rows, width]; `rounded` gets it in 8 bits."""
    rows, width = out.shape
    block = min(1024, triton.next_power_of_2(width)) if rounded is None else padded(width, rounded)
    _silu_times_up[(rows, triton.cdiv(width, block))](
        gate_up, out, *memory_of(rounded, out),
        WIDTH=width, BLOCK=block, GROUP=group_of(rounded, block), num_warps=row_warps(block), **ahead(out),
    )  # fmt: skip
    return out


@kernel()
def _take_rows(source, rows, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    there = columns < WIDTH
    tl.store(out + place * WIDTH + columns, tl.load(source + row * WIDTH + columns, mask=there), mask=there)


def take_rows(source: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """out[i] = source[rows[i]]."""
    width = source.shape[1]
    _take_rows[(len(rows),)](source, rows, out, WIDTH=width, BLOCK=triton.next_power_of_2(width))
    return out


@kernel(do_not_specialize=("count",))
def _widen(numbers, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(numbers + at, mask=at < count).to(tl.float32), mask=at < count)


def widen(numbers: Tensor) -> Tensor:
    """A copy in float32."""
    out = torch.empty(numbers.shape, dtype=torch.float32, device=numbers.device)
    _widen[(triton.cdiv(numbers.numel(), 4096),)](numbers, out, numbers.numel(), BLOCK=4096, num_warps=8)
    return out
