"""Rotary embedding of a pass's queries and keys, with the write of keys and values to KV memory.

Packed rows are 8-bit floats with a float32 scale for every token and head. A slot has the numbers of all heads, then
the scales of all heads, then padding, so that slots begin at multiples of 16 bytes. The tensor has the shape bytes
[slots, kv heads, dim + 4], but its last axis is not one head's memory: only the stride between slots is meaningful.
A head's numbers are stored in pairs, one of its first half and one of its second; attention loads a pair as 16 bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.backends.cuda.kernels.dependent_launch import begin_kernel, pdl_options
from foreword.backends.cuda.kernels.fp8 import FP8, LARGEST, LEAST
from foreword.kernels.launching import kernel

HEADS_AT_ONCE = 16
"""Heads of a row that one program rotates."""


@kernel()
def _rotate_and_store(
    qkv, cosines, sines, slots, query_norm, key_norm, queries, keys, values, key_scales, value_scales, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr,
    SLOT_BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate some heads of one row: write queries to `queries`, keys and values to the row's KV slot.

    A head is processed in pairs of numbers: first those of its leading ROTATED numbers, then the others, which are not
    rotated. SLOT_BYTES: bytes of a slot of packed rows; 0: rows are not packed.
    """
    begin_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = DIM // 2
    rotated_half: tl.constexpr = ROTATED // 2
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    pair = tl.arange(0, HALF_BLOCK)
    if ROTATED == DIM:
        i, offset = pair[None, :], half
    else:
        i = tl.where(pair < rotated_half, pair, pair + rotated_half)[None, :]
        offset = tl.where(pair < rotated_half, rotated_half, half - rotated_half)[None, :]
    mask = (head < HEADS + 2 * KV_HEADS)[:, None] & (pair < half)[None, :]
    is_query = mask & (head < HEADS)[:, None]
    is_key = mask & ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None]
    is_value = mask & (head >= HEADS + KV_HEADS)[:, None]
    source_head, width = head, HEADS + 2 * KV_HEADS
    if GATED:  # every query is followed by its gate
        source_head, width = head + tl.minimum(head, HEADS), 2 * HEADS + 2 * KV_HEADS
    source = qkv + (row * width + source_head)[:, None] * DIM + i
    first = tl.load(source, mask=mask, other=0.0)
    second = tl.load(source + offset, mask=mask, other=0.0)
    slot = tl.load(slots + row).to(tl.int64)
    value_head = head - HEADS - KV_HEADS
    _store_heads(
        first, second, values, value_scales, slot, value_head, i, offset, is_value, KV_HEADS, DIM, SLOT_BYTES
    )
    a, b = first.to(tl.float32), second.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / DIM + eps)[:, None]
        dtype = qkv.dtype.element_ty
        gain = tl.where((head < HEADS)[:, None], query_norm, key_norm) + i
        a = (tl.load(gain, mask=mask, other=0.0) * (a * scale).to(dtype)).to(tl.float32)
        b = (tl.load(gain + offset, mask=mask, other=0.0) * (b * scale).to(dtype)).to(tl.float32)
    cos = tl.load(cosines + row * rotated_half + pair, mask=pair < rotated_half, other=1.0)[None, :]
    sin = tl.load(sines + row * rotated_half + pair, mask=pair < rotated_half, other=0.0)[None, :]
    first_half = (a * cos - b * sin).to(queries.dtype.element_ty)
    second_half = (b * cos + a * sin).to(queries.dtype.element_ty)
    query_at = queries + (row * HEADS + head)[:, None] * DIM + i
    tl.store(query_at, first_half, mask=is_query)
    tl.store(query_at + offset, second_half, mask=is_query)
    _store_heads(
        first_half, second_half, keys, key_scales, slot, head - HEADS, i, offset, is_key, KV_HEADS, DIM, SLOT_BYTES,
    )  # fmt: skip


@triton.jit
def _store_heads(
    first_half, second_half, memory, scales, slot, head, i, offset, mask,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, SLOT_BYTES: tl.constexpr,
):  # fmt: skip
    """Store both halves of some heads, [heads, pairs], in a slot."""
    stride: tl.constexpr = SLOT_BYTES if SLOT_BYTES > 0 else KV_HEADS * DIM
    first, second = i, i + offset
    if SLOT_BYTES > 0:
        first, second = _packed_index(first, DIM), _packed_index(second, DIM)
        largest = tl.maximum(
            tl.max(tl.abs(first_half.to(tl.float32)), axis=1),
            tl.max(tl.abs(second_half.to(tl.float32)), axis=1),
        )
        largest = tl.maximum(largest, LEAST)
        most = tl.full(largest.shape, LARGEST, dtype=tl.float32)
        inverse = tl.div_rn(most, largest)[:, None]
        first_half, second_half = first_half.to(tl.float32) * inverse, second_half.to(tl.float32) * inverse
        scale_at = scales + slot * (stride // 4) + KV_HEADS * DIM // 4 + head
        tl.store(scale_at, tl.div_rn(largest, most), mask=(head >= 0) & (head < KV_HEADS))
    at = memory + slot * stride + head[:, None] * DIM
    tl.store(at + first, first_half.to(memory.dtype.element_ty), mask=mask)
    tl.store(at + second, second_half.to(memory.dtype.element_ty), mask=mask)


@triton.jit
def _packed_index(i, DIM: tl.constexpr):
    """Return where number i of a packed head is stored."""
    return tl.where(i < DIM // 2, 2 * i, 2 * i - DIM + 1)


def packed_bytes(memory: Tensor) -> int:
    """Return the bytes of a slot of packed rows; 0: rows are not packed."""
    return memory.stride(0) if memory.dtype == torch.uint8 else 0


def numbers_and_scales(
    keys: Tensor, values: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return keys, values, and the scales of both, as views of the same memory.

    Packed numbers are viewed as `dtype`. Without packing, keys and values stand in for the scales.
    """
    if not packed_bytes(keys):
        return keys, values, keys, values
    scales = keys.view(torch.float32), values.view(torch.float32)
    return keys.view(dtype), values.view(dtype), *scales


def rotate_and_store(
    qkv: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    slots: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
) -> Tensor:
    """Split qkv [rows, heads + 2 kv heads, dim]: write rotated queries to `out`, rotated keys and values to slots.

    In qkv of gated attention [rows, 2 heads + 2 kv heads, dim], every query is followed by its gate. `norms` are the
    weights of the norms of queries and keys, which are applied before the rotation. Cosines and sines are float32
    [rows, rotated numbers / 2]. Keys and values are [physical rows, kv heads, dim], or packed.
    """
    rows, heads, dim = out.shape
    kv_heads, rotated_dim = keys.shape[1], 2 * cos_sin[0].shape[1]
    query_norm, key_norm = norms or (qkv, qkv)
    _rotate_and_store[(rows, triton.cdiv(heads + 2 * kv_heads, HEADS_AT_ONCE))](
        qkv, *cos_sin, slots, query_norm, key_norm, out, *numbers_and_scales(keys, values, FP8), eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, ROTATED=rotated_dim, HEAD_BLOCK=HEADS_AT_ONCE,
        HALF_BLOCK=triton.next_power_of_2(dim // 2), NORMED=norms is not None,
        GATED=qkv.shape[1] > (heads + 2 * kv_heads) * dim, SLOT_BYTES=packed_bytes(keys), num_warps=8,
        **pdl_options(out),
    )  # fmt: skip
    return out
