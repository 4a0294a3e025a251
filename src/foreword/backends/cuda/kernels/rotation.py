"""Rotary embedding of a pass's queries and keys, with the write of keys and values to KV memory.

Packed rows are 8-bit floats with a scale for every token and head: bytes [slots, kv heads, dim + 4], of which a slot
first has the numbers of all heads, then a float32 for each. Padding lets slots begin at multiples of 16 bytes. A head's
numbers are pairs of one of its first half and one of its second, which attention loads as 16 bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.cuda.kernels.ahead import (
    ahead,
    let_the_next_kernel_come,
    wait_for_the_kernel_before,
)
from foreword.backends.cuda.kernels.fp8 import FP8, LARGEST, LEAST
from foreword.kernels.launching import kernel

HEADS_AT_ONCE = 16
"""Heads of a row that one program rotates."""


@kernel()
def _rotate_and_keep(
    qkv, cosines, sines, slots, query_norm, key_norm, queries, keys, values, key_scales, value_scales, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, TURNED: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Rotate some heads of one row: queries into `queries`; keys and values are written to the row's KV slot.

    A head is processed as pairs: first those of its leading TURNED numbers, then the others, which are not
    rotated.
    """
    let_the_next_kernel_come(AHEAD)
    wait_for_the_kernel_before(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = DIM // 2
    turned: tl.constexpr = TURNED // 2
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    pair = tl.arange(0, HALF_BLOCK)
    if TURNED == DIM:
        i, other = pair[None, :], half
    else:
        i = tl.where(pair < turned, pair, pair + turned)[None, :]
        other = tl.where(pair < turned, turned, half - turned)[None, :]
    there = (head < HEADS + 2 * KV_HEADS)[:, None] & (pair < half)[None, :]
    is_query = there & (head < HEADS)[:, None]
    is_key = there & ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None]
    is_value = there & (head >= HEADS + KV_HEADS)[:, None]
    place, width = head, HEADS + 2 * KV_HEADS
    if GATED:  # every query is followed by its gate
        place, width = head + tl.minimum(head, HEADS), 2 * HEADS + 2 * KV_HEADS
    source = qkv + (row * width + place)[:, None] * DIM + i
    first = tl.load(source, mask=there, other=0.0)
    second = tl.load(source + other, mask=there, other=0.0)
    slot = tl.load(slots + row).to(tl.int64)
    of_value = head - HEADS - KV_HEADS
    _keep(first, second, values, value_scales, slot, of_value, i, other, is_value, KV_HEADS, DIM, PACKED)
    a, b = first.to(tl.float32), second.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / DIM + eps)[:, None]
        kind = qkv.dtype.element_ty
        gain = tl.where((head < HEADS)[:, None], query_norm, key_norm) + i
        a = (tl.load(gain, mask=there, other=0.0) * (a * scale).to(kind)).to(tl.float32)
        b = (tl.load(gain + other, mask=there, other=0.0) * (b * scale).to(kind)).to(tl.float32)
    cos = tl.load(cosines + row * turned + pair, mask=pair < turned, other=1.0)[None, :]
    sin = tl.load(sines + row * turned + pair, mask=pair < turned, other=0.0)[None, :]
    left, right = (
        (a * cos - b * sin).to(queries.dtype.element_ty),
        (b * cos + a * sin).to(queries.dtype.element_ty),
    )
    query_at = queries + (row * HEADS + head)[:, None] * DIM + i
    tl.store(query_at, left, mask=is_query)
    tl.store(query_at + other, right, mask=is_query)
    _keep(left, right, keys, key_scales, slot, head - HEADS, i, other, is_key, KV_HEADS, DIM, PACKED)


@triton.jit
def _keep(
    left, right, memory, scales, slot, head, i, other, there,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Store both halves of some heads, [heads, pairs], in a slot."""
    stride: tl.constexpr = PACKED if PACKED > 0 else KV_HEADS * DIM
    first, second = i, i + other
    if PACKED > 0:
        first, second = _paired(first, DIM), _paired(second, DIM)
        largest = tl.maximum(
            tl.max(tl.abs(left.to(tl.float32)), axis=1), tl.max(tl.abs(right.to(tl.float32)), axis=1)
        )
        largest = tl.maximum(largest, LEAST)
        most = tl.full(largest.shape, LARGEST, dtype=tl.float32)
        inverse = tl.div_rn(most, largest)[:, None]
        left, right = left.to(tl.float32) * inverse, right.to(tl.float32) * inverse
        scale_at = scales + slot * (stride // 4) + KV_HEADS * DIM // 4 + head
        tl.store(scale_at, tl.div_rn(largest, most), mask=(head >= 0) & (head < KV_HEADS))
    at = memory + slot * stride + head[:, None] * DIM
    tl.store(at + first, left.to(memory.dtype.element_ty), mask=there)
    tl.store(at + second, right.to(memory.dtype.element_ty), mask=there)


@triton.jit
def _paired(i, DIM: tl.constexpr):
    """Return the place of number i of a packed head."""
    return tl.where(i < DIM // 2, 2 * i, 2 * i - DIM + 1)


def packed_bytes(memory: Tensor) -> int:
    """Return the bytes of a packed row; 0: rows are not packed."""
    return memory.stride(0) if memory.dtype == torch.uint8 else 0


def numbers_and_scales(
    keys: Tensor, values: Tensor, kind: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, and the scales of both where they are packed, as views of the same memory; numbers as `kind`."""
    if not packed_bytes(keys):
        return keys, values, keys, values
    scales = keys.view(torch.float32), values.view(torch.float32)
    return keys.view(kind), values.view(kind), *scales


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

    In qkv of gated attention [rows, 2 heads + 2 kv heads, dim], every query is followed by its gate.
    `norms` are of queries and keys, before the rotation; cosines and sines are float32 [rows, rotated numbers / 2];
    keys and values are [physical rows, kv heads, dim], or packed.
    """
    rows, heads, dim = out.shape
    kv_heads, turned = keys.shape[1], 2 * cos_sin[0].shape[1]
    query_norm, key_norm = norms or (qkv, qkv)
    _rotate_and_keep[(rows, triton.cdiv(heads + 2 * kv_heads, HEADS_AT_ONCE))](
        qkv, *cos_sin, slots, query_norm, key_norm, out, *numbers_and_scales(keys, values, FP8), eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, TURNED=turned, HEAD_BLOCK=HEADS_AT_ONCE,
        HALF_BLOCK=triton.next_power_of_2(dim // 2), NORMED=norms is not None,
        GATED=qkv.shape[1] > (heads + 2 * kv_heads) * dim, PACKED=packed_bytes(keys), num_warps=8, **ahead(out),
    )  # fmt: skip
    return out
